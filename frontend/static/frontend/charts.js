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

  // Natural steps of time: a label is at each point at which the number of its step changes. Steps are minutes, then months.
  const MINUTES = [1, 5, 15, 30, 60, 120, 180, 360, 720, 1440, 2880, 10080, 20160];
  const MONTHS = [1, 3, 12];
  const MONDAY = 4320; // minutes from a Monday to 1 January 1970
  const naturalSteps = (x, zone, width, space) => {
    const clock = (s) => uPlot.tzDate(new Date(s * 1000), zone);
    const minute = (at) => Math.floor(Date.UTC(at.getFullYear(), at.getMonth(), at.getDate(), at.getHours(), at.getMinutes()) / 60000);
    const clocks = [x[0] - 60, ...x].map(clock);
    const numberings = [
      ...MINUTES.map((step) => (at) => Math.floor((minute(at) + (step > 2880 ? MONDAY : 0)) / step)),
      ...MONTHS.map((step) => (at) => Math.floor((at.getFullYear() * 12 + at.getMonth()) / step)),
    ];
    for (const number of numberings) {
      const found = x.filter((_, i) => number(clocks[i]) !== number(clocks[i + 1]));
      if (found.length * space <= width) return found;
    }
    return x.slice(0, 1);
  };

  const marksAt = (config, at) => config.marks.filter(([index]) => index === at).map(([, , text]) => text);
  // The requests of a point; null: there are none, as in the future.
  const requestsOf = (config, at) => {
    if (!config.requests || at == null || config.x[at] * 1000 > Date.now()) return null;
    const url = new URL(config.requests, location);
    const moment = (s) => new Date(s * 1000).toISOString();
    url.searchParams.set("range", "times");
    url.searchParams.set("from", moment(config.x[at]));
    url.searchParams.set("to", moment(config.x[at + 1] ?? config.x[at] + config.step));
    return url;
  };

  // Lines at the times of marks, each with a triangle on top.
  const drawMarks = (config) => ({
    hooks: {
      draw: ({ ctx, bbox, valToPos }) => {
        ctx.save();
        ctx.strokeStyle = ctx.fillStyle = color("ink-3");
        ctx.lineWidth = devicePixelRatio;
        ctx.setLineDash([2 * devicePixelRatio, 3 * devicePixelRatio]);
        const side = 5 * devicePixelRatio;
        for (const [, at] of config.marks) {
          const x = Math.round(Math.min(valToPos(at, "x", true), bbox.left + bbox.width));
          ctx.beginPath();
          ctx.moveTo(x, bbox.top);
          ctx.lineTo(x, bbox.top + bbox.height);
          ctx.stroke();
          ctx.beginPath();
          ctx.moveTo(x - side, bbox.top);
          ctx.lineTo(x + side, bbox.top);
          ctx.lineTo(x, bbox.top + side * 1.4);
          ctx.fill();
        }
        ctx.restore();
      },
    },
  });

  const tip = (element, config, format, head) => {
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
          u.over.classList.toggle("is-link", Boolean(config.requests));
          u.over.addEventListener("mouseleave", () => { box.hidden = true; });
        },
        setCursor: (u) => {
          const at = u.cursor.idx;
          box.hidden = at == null || u.cursor.left < 0;
          if (box.hidden) return;
          element.at = at;
          const title = document.createElement("b");
          title.textContent = head(config.x[at]);
          const shown = config.series.filter((item) => item.y[at] != null).map((item) => [item, format(item.y[at])]);
          const marks = marksAt(config, at).map((text) => {
            const p = document.createElement("p");
            p.className = "chart-mark";
            p.textContent = text;
            return p;
          });
          box.replaceChildren(title, ...shown.map(([item, text]) => line(item, text)), ...marks);
          element.setAttribute("aria-valuenow", at);
          element.setAttribute("aria-valuetext", [title.textContent, ...shown.map(([item, text]) => `${item.label} ${text}`), ...marks.map((p) => p.textContent)].join(", "));
          const { left } = u.cursor;
          const width = box.offsetWidth;
          box.style.left = `${left + width + 14 > u.over.clientWidth ? Math.max(left - width - 14, 0) : left + 14}px`;
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

  // Arrow keys move over the points of a chart, Enter opens the requests of one.
  const addKeys = (element) => {
    const show = (at) => {
      const { drawn: u, config: { x } } = element;
      element.at = Math.max(0, Math.min(x.length - 1, at));
      u.setCursor({ left: u.valToPos(x[element.at], "x"), top: 0 });
    };
    const open = (url) => { if (url) location.assign(url); };
    const hide = () => element.drawn.setCursor({ left: -10, top: -10 });
    const moves = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageUp: 7, PageDown: -7, Home: -Infinity, End: Infinity };
    on("focus", () => { if (element.matches(":focus-visible")) show(element.at); }, element);
    on("blur", hide, element);
    on("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key in moves) show(element.at + moves[event.key]);
      else if (event.key === "Escape" && element.drawn.cursor.left >= 0) hide();
      else if (event.key === "Enter") open(requestsOf(element.config, element.at));
      else return;
      event.preventDefault();
    }, element);
    on("click", ({ pointerType }) => { // a touch shows the values first
      const { config, drawn: { cursor } } = element;
      if (!config.selects && pointerType !== "touch" && cursor.left >= 0) open(requestsOf(config, cursor.idx));
    }, element);
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
    else addKeys(element);
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
      plugins: [tip(element, config, format, head), drawMarks(config)],
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
