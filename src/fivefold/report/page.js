"use strict";
// Draws the page's curves from the data beside it: pointer near a point tells it, dragging zooms,
// double-click returns, a click on a name hides it. Colours of text and grid are the style sheet's.
(function () {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const MARGIN = { left: 64, right: 14, top: 10, bottom: 44 };
  const SHAPES = {
    circle: "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z", diamond: "M0 -5.5L5.5 0L0 5.5L-5.5 0z",
    square: "M-4 -4h8v8h-8z", triangle: "M0 -5L5 4h-10z"
  };
  let clips = 0;

  function make(name, attributes, parent, text) {
    const node = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const key in attributes) node.setAttribute(key, attributes[key]);
    if (text !== undefined) node.textContent = text;
    if (parent) parent.appendChild(node);
    return node;
  }

  function written(value) {
    const size = Math.abs(value);
    for (const [unit, name] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
      if (size >= unit) return +(value / Math.min(unit, name === "k" ? 1e3 : unit)).toPrecision(4) + name;
    }
    return String(+value.toPrecision(4));
  }

  function roundTicks(low, high, most) {
    const power = 10 ** Math.floor(Math.log10((high - low) / most));
    const step = power * [1, 2, 5, 10, 20].find((factor) => (high - low) / (power * factor) <= most);
    const ticks = [];
    for (let n = Math.ceil(low / step); n * step <= high * (1 + 1e-12); n++) ticks.push([n * step, written(n * step)]);
    return ticks;
  }

  function logTicks(low, high, most) {
    for (const factors of [[1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 5, 7], [1, 2, 5], [1]]) {
      const ticks = [];
      for (let p = Math.floor(Math.log10(low)); p <= Math.log10(high); p++) {
        for (const factor of factors) {
          const value = factor * 10 ** p;
          if (value >= low && value <= high) ticks.push([value, written(value)]);
        }
      }
      if (ticks.length <= most || factors.length === 1) return ticks.length > 1 ? ticks : roundTicks(low, high, most);
    }
  }

  function Axis(log, given, fromZero, values) {
    let low = Math.min(...values), high = Math.max(...values);
    if (log) { low *= 0.95; high *= 1.05; } else {
      const room = 0.05 * (high - low) || 0.1 * Math.abs(high) || 1;
      low = fromZero && low >= 0 ? 0 : low - room;
      high += room;
    }
    const self = { low, high };
    self.share = (value) => log
      ? Math.log(value / self.low) / Math.log(self.high / self.low) : (value - self.low) / (self.high - self.low);
    self.value = (share) => log
      ? self.low * (self.high / self.low) ** share : self.low + share * (self.high - self.low);
    self.ticks = (most) => {
      const inside = given.filter(([value]) => value >= self.low * (1 - 1e-9) && value <= self.high * (1 + 1e-9));
      const every = Math.ceil(inside.length / most);
      if (inside.length > 1) return inside.filter((_, place) => place % every === 0);
      return (log ? logTicks : roundTicks)(self.low, self.high, most);
    };
    return self;
  }

  function start(holder, figure) {
    const hidden = new Set(), clip = "clip" + clips++;
    let view = null;
    const keys = document.createElement("div"), tip = document.createElement("div");
    keys.className = "keys"; tip.className = "tip"; tip.hidden = true;
    holder.before(keys);
    for (const curve of figure.curves.filter((curve) => curve.key)) {
      const button = document.createElement("button");
      button.type = "button"; button.setAttribute("aria-pressed", "true");
      const sample = make("svg", { viewBox: "0 0 24 12" }, button);
      if (curve.width) make("path", { d: "M0 6H24", stroke: curve.colour, "stroke-width": curve.width, "stroke-dasharray": curve.dash }, sample);
      if (curve.marker) make("path", { d: SHAPES[curve.marker], fill: curve.colour, transform: "translate(12 6)" }, sample);
      button.append(curve.name);
      button.onclick = () => {
        hidden.has(curve.name) ? hidden.delete(curve.name) : hidden.add(curve.name);
        button.setAttribute("aria-pressed", String(!hidden.has(curve.name)));
        draw();
      };
      keys.append(button);
    }

    function draw() {
      const width = holder.clientWidth, height = holder.clientHeight;
      if (!width) return;
      const shown = figure.curves.filter((curve) => !hidden.has(curve.name) && curve.x.length);
      const curves = shown.length ? shown : figure.curves;
      const axes = {
        x: Axis(figure.x.log, figure.x.ticks, figure.x.zero, curves.flatMap((curve) => curve.x)),
        y: Axis(figure.y.log, figure.y.ticks, figure.y.zero, [...curves.flatMap((curve) => curve.y), ...figure.marks.map((mark) => mark[1])])
      };
      if (view) { Object.assign(axes.x, view.x); Object.assign(axes.y, view.y); }
      const right = width - MARGIN.right, base = height - MARGIN.bottom;
      const px = (value) => MARGIN.left + axes.x.share(value) * (right - MARGIN.left);
      const py = (value) => base - axes.y.share(value) * (base - MARGIN.top);
      const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, class: "main-svg" });
      make("rect", { x: MARGIN.left, y: MARGIN.top, width: right - MARGIN.left, height: base - MARGIN.top },
        make("clipPath", { id: clip }, svg));
      for (const [value, text] of axes.x.ticks(width < 500 ? 5 : 9)) {
        make("path", { class: "grid", d: `M${px(value)} ${MARGIN.top}V${base}` }, svg);
        make("text", { x: px(value), y: base + 17, "text-anchor": "middle" }, svg, text);
      }
      for (const [value, text] of axes.y.ticks(7)) {
        make("path", { class: "grid", d: `M${MARGIN.left} ${py(value)}H${right}` }, svg);
        make("text", { x: MARGIN.left - 7, y: py(value) + 4, "text-anchor": "end" }, svg, text);
      }
      make("path", { class: "axis", fill: "none", d: `M${MARGIN.left} ${MARGIN.top}V${base}H${right}` }, svg);
      make("text", { x: (MARGIN.left + right) / 2, y: height - 8, "text-anchor": "middle" }, svg, figure.x.name);
      const middle = (MARGIN.top + base) / 2;
      make("text", { x: 13, y: middle, "text-anchor": "middle", transform: `rotate(-90 13 ${middle})` }, svg, figure.y.name);
      const inner = make("g", { "clip-path": `url(#${clip})` }, svg);
      for (const [name, value] of figure.marks) {
        make("path", { class: "mark", d: `M${MARGIN.left} ${py(value)}H${right}` }, inner);
        make("text", { x: MARGIN.left + 6, y: py(value) + 14 }, inner, name);
      }
      const near = [];
      for (const curve of shown) {
        const points = curve.x.map((x, place) => [px(x), py(curve.y[place])]);
        points.forEach((point, place) => near.push([...point, curve, place]));
        const line = points.map(([x, y], place) => !place ? `M${x.toFixed(1)} ${y.toFixed(1)}`
          : curve.stepped ? `V${y.toFixed(1)}H${x.toFixed(1)}` : `L${x.toFixed(1)} ${y.toFixed(1)}`).join("");
        if (curve.filled) make("path", { d: `${line}V${base}H${points[0][0]}z`, fill: curve.colour, opacity: 0.3 }, inner);
        if (curve.width) make("path", { d: line, fill: "none", stroke: curve.colour, "stroke-width": curve.width, "stroke-dasharray": curve.dash, "stroke-linejoin": "round", opacity: curve.key || curve.dash || curve.filled ? 1 : 0.45 }, inner);
        if (curve.marker) for (const [x, y] of points) make("path", { d: SHAPES[curve.marker], fill: curve.colour, transform: `translate(${x.toFixed(1)} ${y.toFixed(1)})` }, inner);
      }
      const ring = make("circle", { class: "near", r: 7, visibility: "hidden" }, svg);
      const frame = make("rect", { class: "zoom", visibility: "hidden" }, svg);
      holder.replaceChildren(svg, tip);
      listen(svg, ring, frame, near, axes, { right, base });
    }

    function listen(svg, ring, frame, near, axes, { right, base }) {
      let from = null;
      const inside = (event) => {
        const box = svg.getBoundingClientRect();
        return [Math.min(right, Math.max(MARGIN.left, event.clientX - box.left)), Math.min(base, Math.max(MARGIN.top, event.clientY - box.top))];
      };
      const ends = (a, b, start, end, axis) => [Math.min(a, b), Math.max(a, b)].map((at) => axis.value((at - start) / (end - start)));
      svg.onpointerdown = (event) => { if (event.button === 0 && event.pointerType === "mouse") { from = inside(event); svg.setPointerCapture(event.pointerId); } };
      svg.onpointermove = (event) => {
        const [x, y] = inside(event);
        if (from) {
          const box = { x: Math.min(x, from[0]), y: Math.min(y, from[1]), width: Math.abs(x - from[0]), height: Math.abs(y - from[1]) };
          for (const key in box) frame.setAttribute(key, box[key]);
          frame.setAttribute("visibility", "visible");
        }
        const best = near.reduce((found, point) => {
          const away = Math.hypot(point[0] - x, point[1] - y);
          return away < found[0] ? [away, point] : found;
        }, [40, null])[1];
        ring.setAttribute("visibility", best ? "visible" : "hidden");
        tip.hidden = !best;
        if (!best) return;
        const [bx, by, curve, place] = best;
        ring.setAttribute("cx", bx); ring.setAttribute("cy", by);
        tip.textContent = curve.name + "\n" + (curve.texts.length ? curve.texts[place]
          : `${written(curve.y[place])} at ${written(curve.x[place])}`);
        tip.style.left = Math.max(0, Math.min(bx + 12, right - tip.offsetWidth)) + "px";
        tip.style.top = Math.max(0, by - tip.offsetHeight - 10) + "px";
      };
      svg.onpointerleave = () => { if (!from) { tip.hidden = true; ring.setAttribute("visibility", "hidden"); } };
      svg.onpointerup = (event) => {
        if (!from) return;
        const [x, y] = inside(event), [fx, fy] = from;
        from = null;
        frame.setAttribute("visibility", "hidden");
        if (Math.abs(x - fx) < 8 || Math.abs(y - fy) < 8) return;
        const [left, rightmost] = ends(x, fx, MARGIN.left, right, axes.x);
        const [top, bottom] = ends(y, fy, base, MARGIN.top, axes.y);
        view = { x: { low: left, high: rightmost }, y: { low: Math.min(top, bottom), high: Math.max(top, bottom) } };
        draw();
      };
      svg.ondblclick = () => { view = null; draw(); };
    }

    new ResizeObserver(draw).observe(holder);
    window.addEventListener("beforeprint", draw);
    window.addEventListener("afterprint", draw);
    draw();
  }

  for (const key in figures) start(document.getElementById("plot-" + key), figures[key]);
})();
