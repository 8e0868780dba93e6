// Draws each [data-chart] from the JSON element with that ID (frontend/core/charts.py).
"use strict";
{
  const root = document.documentElement;
  const probe = document.createElement("span");
  probe.hidden = true;
  document.body.append(probe);
  const color = (token, alpha = 1) => {
    probe.style.color = `var(--${token})`;
    const [r, g, b] = getComputedStyle(probe).color.match(/[\d.]+/g);
    return `rgba(${r},${g},${b},${alpha})`;
  };
  const TOKENS = { spend: "blue", forecast: "blue", uncached: "blue", p50: "blue", cached: "teal", hit: "teal", output: "orange", p95: "orange", written: "violet", limit: "bad", failed: "bad", goal: "ink-3" };
  const tokenOf = ({ kind }) => TOKENS[kind] || (/^s\d/.test(kind) ? kind : "blue");
  const DASHES = { dash: [5, 4], dots: [2, 4] };
  const lang = document.documentElement.lang;
  // Labels of an axis: 20K, 1.5M.
  const tick = (v) => {
    const [unit, name] = numbers.UNITS.find(([unit]) => v >= unit) || [1, ""];
    return String(Number((v / Number(unit)).toPrecision(3))).replace(".", numbers.point) + name;
  };
  const ratio = (v) => numbers.share(Math.round(v * 10000), 1000000);
  const AXIS = {
    tokens: tick,
    count: tick,
    decimal: tick,
    ms: (v) => (v ? numbers.duration(Math.round(v * 1000)) : "0"),
    percent: (v) => `${tick(v)}%`,
  };
  const EXACT = { tokens: numbers.exact, count: numbers.exact, decimal: (v) => numbers.fixed(Math.round(v * 100), 2), ms: AXIS.ms, percent: ratio };
  const moneyIn = ({ symbol, digits }) => {
    const format = (v) => numbers.money(Math.round(v * 1e6), symbol, digits);
    return [(v) => (v >= 1000 || Number.isInteger(v) ? numbers.placed(tick(v), symbol) : format(v)), format];
  };
  const times = (zone) => {
    const form = (options) => { const f = new Intl.DateTimeFormat(lang === "en" ? "en-GB" : lang, { timeZone: zone, ...options }); return (s) => f.format(new Date(s * 1000)); };
    return { day: form({ day: "numeric", month: "short" }), hour: form({ hour: "2-digit", minute: "2-digit" }) };
  };

  const tip = (config, format, head) => {
    let box;
    const line = (item, text) => {
      const p = document.createElement("p");
      const swatch = document.createElement("i");
      swatch.className = `swatch ${item.style} ${item.kind}`;
      const label = document.createElement("span");
      label.textContent = item.label;
      const value = document.createElement("span");
      value.textContent = text;
      p.append(swatch, label, value);
      return p;
    };
    return {
      hooks: {
        init: (u) => {
          box = document.createElement("div");
          box.className = "chart-tooltip";
          box.hidden = true;
          u.over.append(box);
          u.over.addEventListener("mouseleave", () => { box.hidden = true; });
        },
        setCursor: (u) => {
          const at = u.cursor.idx;
          box.hidden = at == null || u.cursor.left < 0;
          if (box.hidden) return;
          const title = document.createElement("b");
          title.textContent = head(config.x[at]);
          box.replaceChildren(title, ...config.series.filter((item) => item.y[at] != null).map((item) => line(item, format(item.y[at]))));
          const left = u.cursor.left;
          box.style.left = `${left + 210 > u.over.clientWidth ? Math.max(left - 195, 0) : left + 14}px`;
        },
      },
    };
  };

  // The first `layers` series are stacked, the others are lines over them.
  const stackValues = (series, layers) => series.map((item, i) => (i < layers ? item.y.map((_, at) => series.slice(i, layers).reduce((sum, layer) => sum + (layer.y[at] || 0), 0)) : item.y));

  const hatch = (token) => {
    const tile = document.createElement("canvas");
    tile.width = tile.height = 8;
    const pen = tile.getContext("2d");
    pen.fillStyle = color(token, 0.1);
    pen.fillRect(0, 0, 8, 8);
    pen.strokeStyle = color(token, 0.32);
    pen.lineWidth = 1.5;
    pen.beginPath();
    for (const shift of [-8, 0, 8]) { pen.moveTo(shift, 8); pen.lineTo(shift + 8, 0); }
    pen.stroke();
    return pen.createPattern(tile, "repeat");
  };

  const draw = (element) => {
    const source = document.getElementById(element.dataset.chart);
    if (!source) return;
    const config = JSON.parse(source.textContent);
    element.drawn?.destroy();
    const { day, hour } = times(config.zone);
    const by = { day, hour: (s) => (hour(s) === "00:00" ? day(s) : hour(s)) };
    const head = config.bucket === "day" ? day : (s) => `${day(s)}, ${hour(s)}`;
    const band = config.band?.map((label) => config.series.findIndex((item) => item.label === label));
    const layers = config.stacked ? config.series.filter((item) => item.style === "area").length : 0;
    const text = color("ink-3");
    const font = "12px Inter, system-ui, sans-serif";
    const series = config.series.map((item, i) => {
      const token = tokenOf(item);
      const shaded = band?.includes(i);
      return {
        stroke: shaded ? "transparent" : color(token),
        width: item.style === "line" || item.style === "area" ? 2 : 1.75,
        dash: DASHES[item.style],
        fill: item.style === "area" && !config.stacked ? color(token, 0.11) : layers && i === layers - 1 ? color(token, 0.34) : undefined,
        // Points of values that no line shows.
        points: { show: true, size: 5, fill: color(token), filter: () => item.y.flatMap((v, at) => (v != null && item.y[at - 1] == null && item.y[at + 1] == null ? [at] : [])) },
        spanGaps: false,
      };
    });
    const bands = config.stacked
      ? config.series.slice(0, layers - 1).map((item, i) => ({ series: [i + 1, i + 2], fill: color(tokenOf(item), 0.36) }))
      : band ? [{ series: [band[0] + 1, band[1] + 1], fill: () => hatch(tokenOf(config.series[band[0]])) }] : [];
    const ys = config.stacked ? stackValues(config.series, layers) : config.series.map((item) => item.y);
    const [label, format] = config.unit === "usd" ? moneyIn(config) : [AXIS[config.unit], EXACT[config.unit]];
    const maxLabel = label(Math.max(...ys.flat().filter((v) => v != null), 0));
    const axis = { stroke: text, font, ticks: { show: false } };
    element.drawn = new uPlot({
      width: element.clientWidth,
      height: element.clientHeight,
      padding: config.bare ? [4, 0, 4, 0] : [10, 18, 0, 0],
      legend: { show: false },
      tzDate: (s) => uPlot.tzDate(new Date(s * 1000), config.zone),
      cursor: { y: false, drag: { x: false, y: false }, points: { size: 7, width: 2 } },
      scales: { x: { time: true }, y: { range: (u, low, high) => (config.bare ? [Math.max(0, low - (high - low) * 0.6), high + (high - low) * 0.15 || 1] : [0, (high || 1) * 1.08]) } },
      axes: config.bare ? [{ show: false }, { show: false }] : [
        { ...axis, grid: { show: false }, gap: 6, size: 30, space: config.bucket === "day" ? 72 : 62, values: (u, all) => all.map((s, i) => (i && by[config.bucket](all[i - 1]) === by[config.bucket](s) ? "" : by[config.bucket](s))) },
        { ...axis, grid: { stroke: color("grid"), width: 1 }, gap: 8, size: Math.max(40, maxLabel.length * 7.5 + 14), space: 42, values: (u, all) => all.map(label) },
      ],
      series: [{}, ...series],
      bands,
      plugins: [tip(config, format, head)],
    }, [config.x, ...ys], element);
  };

  const all = (within) => within.querySelectorAll("[data-chart]");
  const redraw = (within) => { for (const element of all(within)) draw(element); root.dataset.drawn = ""; };
  const sizes = new ResizeObserver((changed) => {
    for (const { target, contentRect: { width, height } } of changed) {
      if (!width) continue;
      if (!target.drawn) draw(target);
      else if (Math.abs(target.drawn.width - width) > 1 || Math.abs(target.drawn.height - height) > 1) target.drawn.setSize({ width, height });
    }
  });
  const watch = (within) => all(within).forEach((element) => sizes.observe(element));
  document.fonts.ready.then(() => { redraw(document); watch(document); });
  document.addEventListener("htmx:afterSettle", ({ detail: { target } }) => { redraw(target); watch(target); });
  root.addEventListener("themed", () => redraw(document));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redraw(document));
}
