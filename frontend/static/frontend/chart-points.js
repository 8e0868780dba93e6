// The points of charts (charts.js): their values and marks by pointer and keyboard, and their requests.
"use strict";
{
  const MOVES = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageUp: 7, PageDown: -7, Home: -Infinity, End: Infinity };

  // Opens the requests of a point, unless there are none, as in the future.
  const openRequests = ({ requests, x, step }, at) => {
    if (!requests || at == null || x[at] * 1000 > Date.now()) return;
    const url = new URL(requests, location);
    const moment = (s) => new Date(s * 1000).toISOString();
    url.searchParams.set("range", "times");
    url.searchParams.set("from", moment(x[at]));
    url.searchParams.set("to", moment(x[at + 1] ?? x[at] + step));
    location.assign(url);
  };

  const boxOf = ({ over }) => {
    let box = $(".chart-tooltip", over);
    if (!box) {
      box = document.createElement("div");
      box.className = "chart-tooltip";
      box.hidden = true;
      over.append(box);
      on("mouseleave", () => { box.hidden = true; }, over);
    }
    return box;
  };
  const line = ({ style, kind, label }, text) => {
    const p = document.createElement("p");
    const swatch = document.createElement("i");
    swatch.className = `swatch ${style} ${kind}`;
    p.append(swatch, ...[label, text].map((part) => {
      const span = document.createElement("span");
      span.textContent = part;
      return span;
    }));
    return p;
  };
  const markLine = (text) => {
    const p = document.createElement("p");
    p.className = "chart-mark";
    p.textContent = text;
    return p;
  };
  // Shows the values of the point at the cursor.
  const show = (element, plot = element.drawn) => {
    const { config } = element;
    const { idx: at, left } = plot.cursor;
    const box = boxOf(plot);
    box.hidden = at == null || left < 0;
    if (box.hidden) return;
    element.at = at;
    const title = document.createElement("b");
    title.textContent = config.head(config.x[at]);
    const shown = config.series.filter((item) => item.y[at] != null).map((item) => [item, config.format(item.y[at])]);
    const marks = config.marks.filter(([index]) => index === at).map(([, , text]) => text);
    box.replaceChildren(title, ...shown.map(([item, text]) => line(item, text)), ...marks.map(markLine));
    element.setAttribute("aria-valuenow", at);
    element.setAttribute("aria-valuetext", [title.textContent, ...shown.map(([item, text]) => `${item.label} ${text}`), ...marks].join(", "));
    const width = box.offsetWidth;
    box.style.left = `${left + width + 14 > plot.over.clientWidth ? Math.max(left - width - 14, 0) : left + 14}px`;
  };
  const moveTo = (element, at) => {
    const { drawn, config: { x } } = element;
    element.at = Math.max(0, Math.min(x.length - 1, at));
    drawn.setCursor({ left: drawn.valToPos(x[element.at], "x"), top: 0 });
  };
  const hide = ({ drawn }) => drawn.setCursor({ left: -10, top: -10 });

  window.chartPoints = {
    show,
    blur: hide,
    pointerenter: (element) => show(element),
    focus: (element) => { if (element.matches(":focus-visible")) moveTo(element, element.at); },
    keydown: (element, { key }) => {
      if (key in MOVES) moveTo(element, element.at + MOVES[key]);
      else if (key === "Escape") hide(element);
      else openRequests(element.config, element.at);
    },
    click: ({ config, drawn: { cursor } }, { pointerType }) => { // a touch shows the values first
      if (!config.selects && pointerType !== "touch" && cursor.left >= 0) openRequests(config, cursor.idx);
    },
  };
}
