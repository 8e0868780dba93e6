// The cost explorer: a click on a segment filters by it; with Shift, it opens the requests of the segment.
"use strict";
{
  const open = (link, event) => {
    event.preventDefault();
    location.assign((event.shiftKey && link.dataset.requests) || link.href);
  };
  // The segment below the pointer: the series are stacked, the first one on top.
  const segmentAt = (chart) => {
    const plot = chart.drawn;
    const at = plot?.cursor.idx;
    if (at == null) return null;
    const { series, stacked } = JSON.parse(document.getElementById(chart.dataset.chart).textContent);
    const value = plot.posToVal(plot.cursor.top, "y");
    const tops = series.map((item, i) => (item.style === "dash" ? null : plot.data[i + 1][at]));
    const near = tops.map((top, i) => [top, i]).filter(([top]) => top != null && (!stacked || top >= value));
    const distance = ([top]) => Math.abs(top - value);
    return near.length ? near.reduce((best, next) => (distance(next) < distance(best) || (stacked && distance(next) === distance(best)) ? next : best))[1] : null;
  };
  on("click", (event) => {
    const link = event.target.closest("a[data-segment]");
    if (link && event.shiftKey) return open(link, event);
    const chart = event.target.closest(".explorer .u-over")?.closest("[data-chart]");
    const segment = chart && segmentAt(chart);
    const row = segment != null && $(`a[data-segment="${segment}"]`);
    if (row) open(row, event);
  });
}
