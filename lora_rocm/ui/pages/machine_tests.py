"""The GPU self-test, and the speed of copies, started on the page Machine. Both use the GPU in child processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lora_rocm.commands.output import Notify
from lora_rocm.errors import UserError
from lora_rocm.ui.background import Work
from lora_rocm.ui.context import context_of
from lora_rocm.ui.fields import query_of, text_of
from lora_rocm.ui.free_gpu import require_no_training
from lora_rocm.ui.rendering import fragment

TEMPLATE = "machine.html.j2"


def self_test(notify: Notify) -> str:
    """Run the self-test of ``lora-rocm doctor``. Its progress has the results."""
    from lora_rocm.rules.this_machine import situation_here
    from lora_rocm.supervisor import selftest_runner

    selftest_runner.self_test(situation_here(deep=True), notify)
    return ""


def transfer(notify: Notify) -> str:
    """Run ``lora-rocm bench transfer``, and return its tables."""
    from lora_rocm.commands import bench

    return bench.render(bench.transfer(notify))


TESTS: Mapping[str, Callable[[Notify], str]] = {"self-test": self_test, "transfer": transfer}
"""Name -> the test. Each reports its progress and returns a text."""


def state(request: Request) -> Response:
    """The tests: their buttons, progress and results."""
    background = context_of(request).background
    return fragment(request, TEMPLATE, "tests", tests={name: background.of(_key(name)) for name in TESTS})


async def begin(request: Request) -> Response:
    """Begin a test in the background, unless a run is training."""
    name = await text_of(request, "test")
    return await run_in_threadpool(_begin, request, name)


def _begin(request: Request, name: str) -> Response:
    ui, test = context_of(request), TESTS.get(name)
    if test is None:
        raise UserError("field-unknown", "There is no such test.", where=name[:40], fix="Reload the page.")
    require_no_training(ui.folders)

    def run(work: Work) -> str:
        def report(text: str) -> None:
            work.report(text)
            work.require_wanted()

        return test(report)

    ui.background.start(_key(name), run)
    return state(request)


def cancel(request: Request) -> Response:
    """Cancel a test: at its next line, its child process is ended."""
    if (work := context_of(request).background.of(_key(query_of(request, "test")))) is not None:
        work.cancel()
    return state(request)


def _key(name: str) -> str:
    return f"machine-{name}"


ROUTES = [
    Route("/machine/tests", state),
    Route("/machine/tests/begin", begin, methods=["POST"]),
    Route("/machine/tests/cancel", cancel, methods=["POST"]),
]
