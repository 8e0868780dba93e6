// Draws every [data-chart] from the JSON of that id (frontend/charts.py), again when the theme or the width changes.
"use strict";
{
  const root = document.documentElement;
  const probe = document.createElement("span");
  probe.hidden = true;
  document.body.append(probe);
  // A canvas cannot read light-dark(): the browser resolves a token for us.
  const color = (token, alpha = 1) => {
    probe.style.color = `var(--${token})`;
    const [r, g, b] = getComputedStyle(probe).color.match(/[\d.]+/g);
    return `rgba(${r},${g},${b},${alpha})`;
  };
  const TOKENS = { spend: "blue", forecast: "blue", uncached: "blue", p50: "blue", cached: "teal", hit: "teal", output: "orange", p95: "orange", written: "violet", limit: "bad", failed: "bad", goal: "ink-3" };
  const DASHES = { dash: [5, 4], dots: [2, 4] };
  const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
  const whole = new Intl.NumberFormat("en");
  const dollars = new Intl.NumberFormat("en-US", { style: "currency", currency: "USD" });
  const small = new Intl.NumberFormat("en-US", { style: "currency", currency: "USD", maximumSignificantDigits: 3 });
  const usd = (v) => (v && Math.abs(v) < 0.1 ? small : dollars).format(v);
  const AXIS = {
    usd: (v) => (v >= 1000 ? `$${compact.format(v).toLowerCase()}` : v && v < 0.1 ? small.format(v) : `$${Number.isInteger(v) ? v : v.toFixed(2)}`),
    tokens: (v) => compact.format(v),
    count: (v) => compact.format(v),
    decimal: (v) => compact.format(v),
    ms: (v) => (v ? `${whole.format(v)} ms` : "0"),
    percent: (v) => `${+v.toFixed(2)}%`,
  };
  const EXACT = { usd, tokens: whole.format, count: whole.format, decimal: (v) => v.toFixed(2), ms: (v) => `${whole.format(Math.round(v))} ms`, percent: (v) => `${v.toFixed(2)}%` };
  const times = (zone) => {
    const form = (options) => { const f = new Intl.DateTimeFormat("en-GB", { timeZone: zone, ...options }); return (s) => f.format(new Date(s * 1000)); };
    return { day: form({ day: "numeric", month: "short" }), hour: form({ hour: "2-digit", minute: "2-digit" }) };
  };

  const tip = (given, told, head) => {
    let box;
    const line = (one, text) => {
      const p = document.createElement("p");
      const swatch = document.createElement("i");
      swatch.className = `swatch ${one.style} ${one.kind}`;
      const label = document.createElement("span");
      label.textContent = one.label;
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
          title.textContent = head(given.x[at]);
          box.replaceChildren(title, ...given.series.filter((one) => one.y[at] != null).map((one) => line(one, told(one.y[at]))));
          const left = u.cursor.left;
          box.style.left = `${left + 210 > u.over.clientWidth ? Math.max(left - 195, 0) : left + 14}px`;
        },
      },
    };
  };

  // Each series stands on those after it: the first is the top of the pile.
  const piled = (series) => series.map((_, i) => series[0].y.map((_, at) => series.slice(i).reduce((sum, one) => sum + (one.y[at] || 0), 0)));

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

  const draw = (place) => {
    const source = document.getElementById(place.dataset.chart);
    if (!source) return;
    const given = JSON.parse(source.textContent);
    place.drawn?.destroy();
    const { day, hour } = times(given.zone);
    const by = { day, hour: (s) => (hour(s) === "00:00" ? day(s) : hour(s)) };
    const head = given.bucket === "day" ? day : (s) => `${day(s)}, ${hour(s)}`;
    const band = given.band?.map((label) => given.series.findIndex((one) => one.label === label));
    const text = color("ink-3");
    const font = "12px Inter, system-ui, sans-serif";
    const series = given.series.map((one, i) => {
      const token = TOKENS[one.kind] || "blue";
      const shaded = band?.includes(i);
      return {
        stroke: shaded ? "transparent" : color(token),
        width: one.style === "line" || one.style === "area" ? 2 : 1.75,
        dash: DASHES[one.style],
        fill: one.style === "area" && !given.stacked ? color(token, 0.11) : given.stacked && i === given.series.length - 1 ? color(token, 0.34) : undefined,
        // Only what no line would show: values with a gap on both sides.
        points: { show: true, size: 5, fill: color(token), filter: () => one.y.flatMap((v, at) => (v != null && one.y[at - 1] == null && one.y[at + 1] == null ? [at] : [])) },
        spanGaps: false,
      };
    });
    const bands = given.stacked
      ? given.series.slice(0, -1).map((one, i) => ({ series: [i + 1, i + 2], fill: color(TOKENS[one.kind] || "blue", 0.36) }))
      : band ? [{ series: [band[0] + 1, band[1] + 1], fill: () => hatch(TOKENS[given.series[band[0]].kind] || "blue") }] : [];
    const ys = given.stacked ? piled(given.series) : given.series.map((one) => one.y);
    const shown = EXACT[given.unit];
    const label = AXIS[given.unit];
    const most = label(Math.max(...ys.flat().filter((v) => v != null), 0));
    const axis = { stroke: text, font, ticks: { show: false } };
    place.drawn = new uPlot({
      width: place.clientWidth,
      height: place.clientHeight,
      padding: given.bare ? [4, 0, 4, 0] : [10, 18, 0, 0],
      legend: { show: false },
      tzDate: (s) => uPlot.tzDate(new Date(s * 1000), given.zone),
      cursor: { y: false, drag: { x: false, y: false }, points: { size: 7, width: 2 } },
      scales: { x: { time: true }, y: { range: (u, low, high) => (given.bare ? [Math.max(0, low - (high - low) * 0.6), high + (high - low) * 0.15 || 1] : [0, (high || 1) * 1.08]) } },
      axes: given.bare ? [{ show: false }, { show: false }] : [
        { ...axis, grid: { show: false }, gap: 6, size: 30, space: given.bucket === "day" ? 72 : 62, values: (u, all) => all.map((s, i) => (i && by[given.bucket](all[i - 1]) === by[given.bucket](s) ? "" : by[given.bucket](s))) },
        { ...axis, grid: { stroke: color("grid"), width: 1 }, gap: 8, size: Math.max(40, most.length * 7.5 + 14), space: 42, values: (u, all) => all.map(label) },
      ],
      series: [{}, ...series],
      bands,
      plugins: [tip(given, shown, head)],
    }, [given.x, ...ys], place);
  };

  const all = (within) => within.querySelectorAll("[data-chart]");
  const again = (within) => { for (const place of all(within)) draw(place); root.dataset.drawn = ""; };
  const sizes = new ResizeObserver((changed) => {
    for (const { target, contentRect: { width, height } } of changed) {
      if (!width) continue;
      if (!target.drawn) draw(target);
      else if (Math.abs(target.drawn.width - width) > 1 || Math.abs(target.drawn.height - height) > 1) target.drawn.setSize({ width, height });
    }
  });
  const watch = (within) => all(within).forEach((place) => sizes.observe(place));
  document.fonts.ready.then(() => { again(document); watch(document); });
  document.addEventListener("htmx:afterSettle", ({ detail: { target } }) => { again(target); watch(target); });
  root.addEventListener("themed", () => again(document));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => again(document));
}
