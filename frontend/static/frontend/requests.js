// The histogram of requests: a click or a drag over bars selects their time.
"use strict";
on("pointerdown", (event) => {
  const chart = event.target.closest("[data-histogram]");
  if (!chart || event.button) return;
  event.preventDefault();
  const bars = [...chart.querySelectorAll("g")];
  const barAt = (x) => {
    const box = chart.getBoundingClientRect();
    return Math.max(0, Math.min(bars.length - 1, Math.floor(((x - box.left) / box.width) * bars.length)));
  };
  const first = barAt(event.clientX);
  let last = first;
  const show = () => bars.forEach((bar, at) => bar.classList.toggle("is-picked", at >= Math.min(first, last) && at <= Math.max(first, last)));
  const move = (moved) => { last = barAt(moved.clientX); show(); };
  const end = () => {
    chart.removeEventListener("pointermove", move);
    const [from, to] = [bars[Math.min(first, last)], bars[Math.max(first, last)]];
    const url = new URL(from.dataset.url, location);
    url.searchParams.set("to", new URL(to.dataset.url, location).searchParams.get("to"));
    location.assign(url);
  };
  chart.setPointerCapture(event.pointerId);
  show();
  on("pointermove", move, chart);
  chart.addEventListener("pointerup", end, { once: true });
  chart.addEventListener("pointercancel", () => { chart.removeEventListener("pointermove", move); chart.removeEventListener("pointerup", end); bars.forEach((bar) => bar.classList.remove("is-picked")); }, { once: true });
});
