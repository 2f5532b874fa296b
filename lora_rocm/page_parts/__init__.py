"""The parts of which all HTML of this program is made: the web page, ``report.html`` and ``compare.html``.

``static/page.css`` has the colours (light and dark) and the styles, ``templates/parts.html.j2`` the macros,
``texts.toml`` the texts, ``charts`` and ``static/chart.js`` the charts. A single file contains these files as text
(``inlined``), so it opens without a server. Nothing here imports a server.
"""
