"""The web page (``lora-rocm ui``): a thin layer over the commands, for a browser.

Nothing here imports torch, asks a GPU, or stores a state. Recipes and captions are files, runs are directories, and
each page is computed from them. The server may end at any time: nothing is lost, and runs continue.

A part of the page:
    ``pages/NAME.py`` has its routes and ``PART``, ``templates/NAME.html.j2`` its markup, ``page_parts/texts.toml`` its
    texts under ``[NAME]``. A line in ``application.PARTS`` adds it to the navigation, in the order given there; its
    icon is in the macro ``icon``. A part that is not built has no entry.

Handlers:
    Plain functions ``def name(request: Request) -> Response`` (Starlette runs them in threads), or ``async`` where
    they read fields (``fields.fields_of``, ``fields.text_of``); these hand slow work to ``run_in_threadpool``. They
    get everything from ``context.context_of(request)``, call the same functions as the commands, and return
    ``rendering.page`` (a whole page) or ``rendering.fragment`` (one block of the template, for htmx). A block that
    is rendered alone imports its macros inside (``{% block state scoped %}{% from "parts.html.j2" import badge with
    context %}``), and gets all its values from the handler. Modules
    that are slow to import are imported in handlers, because the first page is due within a second.

Paths:
    Text of a request becomes a path only by ``folders.resolve`` or ``folders.run``; ``folders.name_of`` is the way
    back, and ``url("/runs/view", dir=name)`` quotes it. Images are served by ``thumbnails.thumbnail``.

Errors:
    Handlers raise the errors of ``errors.py`` and catch none. ``rendering.problem`` shows them: a whole page, or
    the box ``#problem`` at the top for htmx, so that what the user has written stays. An element that wants the box
    elsewhere sends the header ``X-Problem-Target`` with a selector (``hx-headers``).

State changes:
    ``hx-post`` needs nothing else, because ``page.js`` adds the proof (``X-CSRF``) to each request of htmx. A plain
    HTML form contains ``{{ proof() }}``, and the handler answers with a 303 redirect. Own scripts send the header with
    ``fetch`` (``csrfHeaders()`` of ``page.js``). Files (``multipart/form-data``) need the header. ``page.js`` drops a
    change of an element while it makes another one (a double click), and a ``GET`` answer that is older than the
    one its target shows. A button that is drawn again has an ``id`` that does not depend on its state: the focus stays.

Edits:
    A change of a file is ``context.edits.save(path, content, if_match)``: it is written completely or not at all,
    only if the file still has the version that the page got with ``edits.read``, and ``edits.undo`` takes it back.
    A conflict raises ``EditConflict``, which is shown with both contents.

Live:
    Each tab has one stream, which ``page.js`` opens. ``page(..., live=url("/live", run=name, **{"from":
    live_id(run)}))`` chooses the run. A message names what has changed, and each name becomes an event of the body:
    ``live:step``, ``live:preview`` and the other types of events, ``live:state`` (began or ended), ``live:reset``
    (ask for everything), ``live:gone``, ``live:runs`` (the list), ``live:queue``, ``live:work-KEY``. An element
    updates itself by ``hx-trigger="live:preview from:body" hx-get="..." hx-swap="innerMorph"``. New steps are in
    ``event.detail.steps``.

Long work:
    ``context.background.start(key, function)`` calls ``function(work)`` in a thread. It starts a heavy child of
    ``processes/jobs.py`` by the same function as the command (never in the event loop, and never torch in this
    process), passes ``work.report`` as ``notify``, calls ``work.advance(done, total)``, and ends at
    ``work.require_wanted()`` if the user cancels. ``work_box`` shows it. Training is another process that outlives
    the server.

Markup:
    No inline script, style or event handler (``on...``, ``hx-on``, ``js:``), and no address outside: the policy of
    ``security.py`` stops them. Behaviour is in modules under ``static/``, colours are variables of ``page.css``.
    Styles, macros, texts and charts are in the room ``page_parts``, because ``report.html`` has the same ones.
    All texts come from ``t("key")``, numbers have units (filters ``size``, ``duration``, ``rate``, ``number``).

Tests:
    ``tests/ui/site.py`` has the page without a browser (fixture ``site``), ``tests/ui/hostile_runs.py`` malicious
    runs, and ``tests/ui/browser/conftest.py`` the fixture ``tab``: Chromium with ``tab.axe()`` and
    ``tab.widest()``. ``test_security.py`` and ``test_every_page.py`` take each
    new route and page by themselves. In a browser, wait with locators and ``tab.settle()``: the policy forbids
    ``wait_for_function``.
"""
