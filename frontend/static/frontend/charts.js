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

  // Labels of time are where the number of a natural step changes: of minutes, then of months.
  const MINUTES = [1, 5, 15, 30, 60, 120, 180, 360, 720, 1440, 2880, 10080, 20160];
  const MONTHS = [1, 3, 12];
  const MONDAY = 4320; // minutes from a Monday to 1 January 1970
  const naturalSteps = (x, zone, width, space) => {
    const clocks = [x[0] - 60, ...x].map((s) => uPlot.tzDate(new Date(s * 1000), zone));
    const minutes = clocks.map((at) => (at - at.getTimezoneOffset() * 60000) / 60000);
    const months = clocks.map((at) => at.getFullYear() * 12 + at.getMonth());
    const numberings = [
      ...MINUTES.map((step) => (i) => Math.floor((minutes[i] + (step > 2880 ? MONDAY : 0)) / step)),
      ...MONTHS.map((step) => (i) => Math.floor(months[i] / step)),
    ];
    for (const number of numberings) {
      const found = x.filter((_, i) => number(i) !== number(i + 1));
      if (found.length * space <= width) return found;
    }
    return x.slice(0, 1);
  };

  const drawMarks = (marks) => ({ ctx, bbox, valToPos }) => {
    const unit = devicePixelRatio;
    ctx.save();
    ctx.fillStyle = color("ink-3");
    for (const [, at] of marks) {
      const x = Math.round(Math.min(valToPos(at, "x", true), bbox.left + bbox.width));
      ctx.fillRect(x, bbox.top, unit, bbox.height);
      ctx.fillRect(x - 4 * unit, bbox.top, 9 * unit, 4 * unit);
    }
    ctx.restore();
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

  // Values and requests of points: loaded when a chart is used.
  const points = document.currentScript.src.replace("charts.js", "chart-points.");
  const KEYS = /^(Arrow.*|Page.*|Home|End|Enter|Escape)$/;
  const act = (event) => {
    if (event.type === "keydown") {
      if (!KEYS.test(event.key) || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
    }
    const element = event.currentTarget;
    Promise.all(["css", "js"].map((kind) => load(points + kind))).then(() => chartPoints[event.type](element, event));
  };
  // The last point with a value that is not in the future.
  const lastPoint = ({ x, series }) => {
    const at = x.findLastIndex((s, i) => s * 1000 <= Date.now() && series.some((item) => item.y[i] != null));
    return at < 0 ? x.length - 1 : at;
  };

  const draw = (element) => {
    const source = document.getElementById(element.dataset.chart);
    if (!source) return;
    const config = JSON.parse(source.textContent);
    if (element.drawn) element.drawn.destroy();
    else for (const type of ["focus", "blur", "keydown", "pointerenter", "click"]) on(type, act, element);
    Object.assign(element, { config, tabIndex: 0, at: lastPoint(config) });
    const attributes = { role: "slider", "aria-valuemin": 0, "aria-valuemax": config.x.length - 1, "aria-valuenow": element.at };
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
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
    Object.assign(config, { format, head });
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
        { ...axis, grid: { show: false }, gap: 6, size: 30, splits: (u) => naturalSteps(config.x, config.zone, u.bbox.width / devicePixelRatio, config.bucket === "day" ? 72 : 62), values: (u, all) => all.map(by[config.bucket]) },
        { ...axis, grid: { stroke: color("grid"), width: 1 }, gap: 8, size: Math.max(40, maxLabel.length * 7.5 + 14), space: 42, values: (u, all) => all.map(label) },
      ],
      series: [{}, ...series],
      bands,
      hooks: { draw: [drawMarks(config.marks)], setCursor: [(u) => window.chartPoints?.show(element, u)] },
    }, [config.x, ...ys], element);
    element.drawn.over.classList.toggle("is-link", Boolean(config.requests));
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
