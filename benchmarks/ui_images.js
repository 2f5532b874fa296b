// Scrolls the grid of benchmarks/ui_images.py by a step in each of several frames, and counts its tiles.
([step, frames]) => new Promise((done) => {
  const grid = document.getElementById("grid");
  const seen = { tiles: 0, frames: 0 };
  const next = () => {
    grid.scrollTop += step;
    seen.tiles = Math.max(seen.tiles, grid.querySelectorAll(".image-tile").length);
    if (++seen.frames < frames) requestAnimationFrame(next);
    else done(seen);
  };
  requestAnimationFrame(next);
})
