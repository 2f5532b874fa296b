// Sets the colours before the page is drawn. Loaded in the head, so that nothing flashes.
"use strict";
try {
  const theme = localStorage.getItem("theme");
  if (theme) document.documentElement.dataset.theme = theme;
} catch {
  // storage is switched off: the system's colours
}
