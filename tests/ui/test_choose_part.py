"""The part Choose without a browser: pictures, votes, result, and copies."""

from __future__ import annotations

import html
import re
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from lora_rocm.commands import comparison_grid, plan
from lora_rocm.commands.comparison_grid import draw_missing, new_request, open_grid, save_request
from lora_rocm.errors import StoppedError
from lora_rocm.page_parts.texts import t
from lora_rocm.processes.jobs import CompareJob
from lora_rocm.rundir.clicks import read_clicks
from lora_rocm.rundir.layout import RunDir
from lora_rocm.supervisor.lock import locked
from lora_rocm.ui.background import key_of
from tests.supervisor.fake_run import event
from tests.ui.drawn_grid import PROMPT, STEPS, STRENGTHS, made_answers, with_files, with_grid, with_text_recipe
from tests.ui.site import Site, code_of

RUN = {"dir": "runs/a-run"}


def token_of(text: str) -> str:
    found = re.search(r"pair=([0-9a-f]{24})", text)
    assert found, text
    return found[1]


class FakeChild:
    """Draws as the child of ``compare`` would: the base, then each file with all strengths and prompts."""

    def __init__(self) -> None:
        self.jobs = list[CompareJob]()
        self.wait: Callable[[], None] = lambda: None

    def __call__(self, job: CompareJob, listen: Any, notify: Any, require_wanted: Callable[[], None]) -> None:
        self.jobs.append(job)
        notify("a <notice>")
        rows = [(0, (1.0,)), *((updates, job.strengths) for updates, _ in job.files)]
        for updates, strengths in rows:
            self.wait()
            require_wanted()
            images = []
            for number in range(len(strengths) * max(1, len(job.prompts))):
                images.append(str(job.output / f"{updates}-{number}.png"))
                Image.new("RGB", (8, 8), (updates, number, 0)).save(images[-1])
            listen(event("compared", updates=updates, total=len(rows), losses={}, images=images))


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> FakeChild:
    made = FakeChild()
    monkeypatch.setattr(comparison_grid, "run_model_tool", made)
    return made


def test_only_runs_with_files_are_listed(site: Site) -> None:
    assert "/choose/run" not in site.get("/choose")
    with_files(site.run())
    assert "/choose/run?dir=runs%2Fa-run" in site.get("/choose")


def test_the_missing_pictures_are_drawn_and_no_others(site: Site, child: FakeChild) -> None:
    run_dir = with_files(site.run())
    fields = {"prompts": f"{PROMPT}\n\n", "strengths": "0.8, 1", "most": "3"}
    assert site.client.post("/choose/draw", params=RUN, data=fields).status_code == 200
    work = site.context.background.of(key_of("choose", "runs/a-run"))
    assert work is not None and work._ended.wait(10) and work.error is None and work.result.count == 7
    (job,) = child.jobs
    assert [updates for updates, _ in job.files] == [*STEPS] and job.strengths == STRENGTHS and job.prompts == (PROMPT,)
    _, recipe, grid = open_grid(run_dir.path)
    assert grid is not None and grid.missing == []
    with Image.open(grid.row(20, 1.0)[0].path) as image:
        assert image.getpixel((0, 0)) == (20, 1, 0)
    # everything is there: nothing is drawn; a changed file is drawn again
    assert draw_missing(run_dir, recipe, grid) == 0 and len(child.jobs) == 1
    run_dir.checkpoint_lora(20).write_bytes(run_dir.checkpoint_lora(40).read_bytes() + b" ")
    grid = open_grid(run_dir.path)[2]
    assert grid is not None and {cell.updates for cell in grid.missing} == {20}
    assert draw_missing(run_dir, recipe, grid) == 2
    assert [updates for updates, _ in child.jobs[-1].files] == [20]
    # a new strength is drawn alone
    fields["strengths"] = "0.8 1 1.2"
    site.client.post("/choose/draw", params=RUN, data=fields)
    work = site.context.background.of(key_of("choose", "runs/a-run"))
    assert work is not None and work._ended.wait(10) and work.result.count == 3
    assert "a &lt;notice&gt;" in site.get("/choose/drawing", **RUN)
    assert child.jobs[-1].strengths == (1.2,) and site.get("/choose/pictures", **RUN).count("<img") == 10


def test_drawing_is_cancelled_and_keeps_finished_files(site: Site, child: FakeChild) -> None:
    run_dir, begun, go_on = with_files(site.run()), threading.Event(), threading.Event()
    rounds = [0]

    def wait() -> None:
        rounds[0] += 1
        if rounds[0] == 3:
            begun.set()
            assert go_on.wait(10)

    child.wait = wait
    fields = {"prompts": PROMPT, "strengths": "1", "most": "3"}
    site.client.post("/choose/draw", params=RUN, data=fields)
    assert begun.wait(10)
    assert "badge-running" in site.get("/choose/drawing", **RUN)
    assert code_of(site.client.post("/choose/draw", params=RUN, data=fields).text) == "work-runs-already"
    site.client.post("/choose/cancel", params=RUN)
    go_on.set()
    work = site.context.background.of(key_of("choose", "runs/a-run"))
    assert work is not None and work._ended.wait(10) and isinstance(work.error, StoppedError)
    grid = open_grid(run_dir.path)[2]
    assert grid is not None and {cell.updates for cell in grid.missing} == {20, 40}


@pytest.mark.parametrize(
    ("room_gib", "needed_gib", "has_room"), [(24, 8, True), (24, 13, False), (None, 8, False), (24, None, False)]
)
def test_nothing_is_drawn_next_to_a_run_without_room(
    room_gib: int | None,
    needed_gib: int | None,
    has_room: bool,
    site: Site,
    child: FakeChild,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen = None if needed_gib is None else SimpleNamespace(needed_bytes=needed_gib * 2**30)
    room = SimpleNamespace(num_bytes=None if room_gib is None else room_gib * 2**30)
    monkeypatch.setattr(plan, "plan", lambda recipe: SimpleNamespace(room=room, chosen=chosen))
    run_dir = with_files(site.run())
    run_dir.result.unlink()
    with locked(run_dir):
        site.client.post("/choose/draw", params=RUN, data={"prompts": PROMPT, "strengths": "1", "most": "1"})
        work = site.context.background.of(key_of("choose", "runs/a-run"))
        assert work is not None and work._ended.wait(10)
        assert (work.error is None) is has_room and bool(child.jobs) is has_room
        assert has_room or (work.error is not None and work.error.code == "no-room-while-training")


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"strengths": "0.8, x"}, "number-wrong"),
        ({"strengths": "nan"}, "grid-size"),
        ({"strengths": "1 2 3 4 5 6 7 8 9 10 11"}, "grid-size"),
        ({"most": "0"}, "grid-size"),
        ({"most": "1e9"}, "grid-size"),
        ({"prompts": "x --w 64"}, "prompt-options"),
        ({"prompts": "\n".join(map(str, range(21)))}, "grid-size"),
    ],
)
def test_wrong_wishes_are_refused(fields: dict[str, str], code: str, site: Site, child: FakeChild) -> None:
    run_dir = with_files(site.run())
    answer = site.client.post("/choose/draw", params=RUN, data={"prompts": "a", "strengths": "1", "most": "2"} | fields)
    assert code_of(answer.text) == code and child.jobs == [] and not run_dir.grid.exists()


def test_a_vote_is_recorded_and_the_pair_is_blind(site: Site) -> None:
    run_dir = site.run()
    with_grid(run_dir)
    text = site.get("/choose/test", **RUN)
    token = token_of(text)
    assert not re.search(r"strength|\bstep\b|0\.8|\.png|" + "|".join(f">{step}<" for step in STEPS), text, re.I)
    assert "&lt;b&gt;zibu" in text and "<b>zibu" not in text
    pictures = [
        site.client.get("/choose/side", params={**RUN, "pair": token, "side": which}) for which in ("first", "second")
    ]
    assert all(each.headers["content-type"] == "image/jpeg" for each in pictures)
    assert pictures[0].content != pictures[1].content
    answer = site.client.post("/choose/click", params=RUN, data={"pair": token, "preferred": "second"})
    (click,) = read_clicks(run_dir)
    assert click.preferred == "second" and click.prompt == PROMPT and (run_dir.path / click.first.picture).is_file()
    assert {click.first.updates, click.second.updates} <= {*STEPS} and answer.headers["hx-trigger"] == "voted"
    # the earlier pair is closed: neither a second vote nor its pictures
    for preferred, pair in (("first", token), ("first", "0" * 24), ("third", token_of(answer.text))):
        again = site.client.post("/choose/click", params=RUN, data={"pair": pair, "preferred": preferred})
        assert code_of(again.text) == "pair-old"
    assert site.client.get("/choose/side", params={**RUN, "pair": token, "side": "first"}).status_code == 422
    assert len(read_clicks(run_dir)) == 1
    # nor is a vote taken back that the page has not shown
    old, now = (
        site.client.post("/choose/undo", params=RUN, data={"pair": pair}) for pair in (token, token_of(answer.text))
    )
    assert code_of(old.text) == "pair-old" and now.status_code == 200 and not read_clicks(run_dir)


def test_the_result_has_the_held_out_loss_beside_it(site: Site) -> None:
    with_grid(site.run())
    assert t("choose.chance") not in site.get("/choose/ranking", **RUN)
    for _ in range(12):
        token = token_of(site.get("/choose/test", **RUN))
        site.client.post("/choose/click", params=RUN, data={"pair": token, "preferred": "tie"})
    text = site.get("/choose/ranking", **RUN)
    assert text.count('<th scope="row">') == len(STEPS) * len(STRENGTHS) and "0.275" in text  # after step 10


def test_a_file_is_saved_and_copied_only_where_the_user_said(site: Site, tmp_path: Path) -> None:
    run_dir = with_files(site.run())
    answer = site.client.get("/choose/download", params={**RUN, "step": "20"})
    assert answer.content == run_dir.checkpoint_lora(20).read_bytes()
    assert "a-run-lora-step00000020.safetensors" in answer.headers["content-disposition"]
    for step in ("30", "../40", "00000020"):
        assert code_of(site.client.get("/choose/download", params={**RUN, "step": step}).text) == "file-unknown"
    assert code_of(site.client.post("/choose/copy", params=RUN, data={"step": "20"}).text) == "field-missing"
    folder = tmp_path / "ComfyUI ü" / "loras"
    fields = {"step": "20", "own_folder": str(folder)}
    assert code_of(site.client.post("/choose/copy", params=RUN, data=fields).text) == "no-folder"
    folder.mkdir(parents=True)
    assert site.client.post("/choose/copy", params=RUN, data=fields).status_code == 200
    copied = folder / "a-run-lora-step00000020.safetensors"
    assert copied.read_bytes() == run_dir.checkpoint_lora(20).read_bytes()
    # asked once; never over another file
    copied.write_bytes(b"mine")
    assert code_of(site.client.post("/choose/copy", params=RUN, data={"step": "20"}).text) == "file-exists"
    assert copied.read_bytes() == b"mine"
    assert site.client.post("/choose/copy", params=RUN, data={"step": "40"}).status_code == 200
    assert len(list(folder.iterdir())) == 2


def test_a_damaged_request_shows_an_empty_grid(site: Site) -> None:
    run_dir = site.run()
    with_grid(run_dir)
    for content in (b"{", b"[]", b'{"prompts": 1, "strengths": [], "updates": []}', b"\xff"):
        (run_dir.grid / "grid.json").write_bytes(content)
        assert "<img" not in site.get("/choose/run", **RUN)


def test_a_run_without_a_recipe_is_a_sentence(site: Site) -> None:
    run_dir: RunDir = with_files(site.run())
    run_dir.recipe.unlink()
    answer = site.client.get("/choose/run", params=RUN)
    assert answer.status_code in (404, 422) and code_of(answer.text)


def of_texts(site: Site) -> RunDir:
    """A run with the files of STEPS and the recipe of a language model."""
    run_dir = with_files(site.run())
    with_text_recipe(run_dir, site.folder)
    return run_dir


def pair_of(page: str) -> str:
    found = re.search(r'id="pair" value="([0-9a-f]{24})"', page)
    assert found is not None
    return found[1]


def test_a_language_model_has_its_own_words_and_formats(site: Site) -> None:
    with_files(site.run())
    of_images = site.get("/choose/run", **RUN)
    with_text_recipe(site.run_dir("a-run"), site.folder)
    text = site.get("/choose/run", **RUN)
    for key in ("choose_made.text.draw", "choose_made.text.no_pair"):
        assert t(key) in text and t(key) not in of_images
    assert "/runs/exports?dir=runs%2Fa-run&amp;step=40" in text and "/try/run?dir=runs%2Fa-run&amp;file=20" in text
    chat = site.get("/try/run", **RUN)
    assert "/choose/download?dir=runs%2Fa-run&amp;step=40" in chat and "/choose/run?dir=runs%2Fa-run" in chat
    samples = site.run_dir("a-run").samples_at(20)
    (samples / "00.txt").write_text("I am zibu", encoding="utf-8")
    (samples / "requests.json").write_text('[{"prompt": "who are you"}]', encoding="utf-8")
    previews = site.get("/runs/previews", **RUN)
    assert previews.index("who are you") < previews.index("I am zibu")
    assert "/choose/copy" in of_images and "/choose/copy" not in text  # no folder of ComfyUI
    run_page = site.get("/runs/view", **RUN)
    for key in ("next_what", "next_try"):
        assert t(f"run_kind.text.{key}") in run_page and t(f"run_kind.image.{key}") not in run_page
    assert t("images_losses.title") not in run_page  # no losses of single texts are recorded


def test_equal_answers_are_ties_without_a_click(site: Site) -> None:
    run_dir = of_texts(site)
    cells = made_answers(run_dir, ["hello", "bye"])
    for cell in cells:
        cell.path.write_text("zibu" if cell.number == 0 else f"zibu {cell.updates}", encoding="utf-8")
    shown = set()
    for number in range(1, 5):
        page = html.unescape(site.get("/choose/test", **RUN))
        answers = re.findall(r'class="answer">([^<]*)<', page)
        assert len(set(answers)) == 2 and ({*answers} not in shown or len(shown) == 3)
        shown.add(frozenset(answers))
        site.client.post("/choose/click", params=RUN, data={"pair": pair_of(page), "preferred": "first"})
        given = [click for click in read_clicks(run_dir) if not click.automatic]
        assert len(given) == number
    ties = [click for click in read_clicks(run_dir) if click.automatic]
    assert ties and {(click.preferred, click.prompt) for click in ties} == {("tie", "hello")}
    assert t("choose.num_ties", count=len(ties)) in html.unescape(site.get("/choose/test", **RUN))
    # A vote that is taken back takes the ties after it with it
    for _ in range(4):
        page = html.unescape(site.get("/choose/test", **RUN))
        site.client.post("/choose/undo", params=RUN, data={"pair": pair_of(page)})
    assert read_clicks(run_dir) == []
    # Without any difference there is no pair, and the page says why
    for cell in cells:
        cell.path.write_text("zibu", encoding="utf-8")
    assert t("choose_made.text.all_equal") in site.get("/choose/test", **RUN)


@pytest.mark.parametrize("is_text", [True, False])
def test_one_file_has_nothing_to_compare(is_text: bool, site: Site) -> None:
    run_dir = of_texts(site) if is_text else with_files(site.run())
    for step in STEPS[:-1]:
        run_dir.checkpoint_lora(step).unlink()
    kind = "text" if is_text else "image"
    said = t(f"choose_made.{kind}.only_one")
    if not is_text:
        assert said not in site.get("/choose/run", **RUN)  # strengths can still be compared
        _, recipe, _ = open_grid(run_dir.path)
        save_request(run_dir, new_request(run_dir, recipe, ["a"], [1.0], 1))
    page = html.unescape(site.get("/choose/run", **RUN))
    assert said in page and t(f"choose_made.{kind}.no_pair") not in page
    assert f"/try/run?dir=runs%2Fa-run&file={STEPS[-1]}" in page and f"step={STEPS[-1]}" in page


@pytest.mark.parametrize("has_answers", [False, True])
def test_losses_and_names_are_folded_away_before_a_vote(has_answers: bool, site: Site) -> None:
    run_dir = of_texts(site)
    if has_answers:
        made_answers(run_dir, ["hello"])
    page = site.get("/choose/run", **RUN)
    folded = {each: re.search(rf'<details[^>]*id="{each}"([^>]*)>', page) for each in ("answer", "named")}
    assert all(found is not None and "open" not in found[1] for found in folded.values())
    assert page.index('id="named"') < page.index('id="grid"') and 'id="leader"' not in page
    assert 'class="num"' not in site.get("/choose/take", **RUN)


def test_the_ranking_does_not_lead_a_voter(site: Site) -> None:
    run_dir = of_texts(site)
    for cell in made_answers(run_dir, ["hello", "bye", "zibu"]):
        cell.path.write_text(f"{cell.updates} {cell.number}", encoding="utf-8")
    for number in range(60):
        page = html.unescape(site.get("/choose/test", **RUN))
        part = html.unescape(site.get("/choose/take", **RUN))
        if "data-settled" in page:
            break
        assert t("choose.best") not in part and 'class="num"' not in part, number
        best = max(re.findall(r'class="answer">(\d+)', page), key=int)
        sides = re.findall(r'class="answer">(\d+)', page)
        data = {"pair": pair_of(page), "preferred": "first" if sides[0] == best else "second"}
        site.client.post("/choose/click", params=RUN, data=data)
        leader = re.search(r'id="leader" href="[^"]*step=(\d+)', site.get("/choose/take", **RUN).replace("&amp;", "&"))
        assert leader is not None, number
    assert leader is not None and leader[1] == str(STEPS[-1])
    assert t("choose.enough", step=STEPS[-1], strength="1") in page
    assert t("choose.best") in part and 'class="num"' in part
    assert re.search(r'id="answer" open', site.get("/choose/run", **RUN))


def test_each_file_has_one_name_wherever_it_is_saved(site: Site) -> None:
    run_dir = with_files(site.run())
    names = set()
    for address, query in (
        ("/choose/download", {"step": "40"}),
        ("/runs/download", {"file": "checkpoints/lora-step00000040.safetensors"}),
    ):
        names.add(site.client.get(address, params={**RUN, **query}).headers["content-disposition"])
    assert len(names) == 1 and f"{run_dir.path.name}-lora-step00000040" in names.pop()
    answer = site.client.get("/runs/download", params={**RUN, "file": "lora.safetensors"})
    assert f'"{run_dir.path.name}-lora.safetensors"' in answer.headers["content-disposition"]
