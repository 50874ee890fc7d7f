// Draws what the page's JSON says. Names of the data come in by textContent alone, never as HTML.
"use strict";
(() => {
  const page = JSON.parse(document.getElementById("data").textContent);
  const drawn = new Map(); // canvas -> what draws it anew
  const MARKS = ["circle", "rect", "triangle", "rectRot", "crossRot", "star", "rectRounded", "line"];
  const NUM_TICKS = 7;

  function el(tag, attributes = {}, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
    }
    node.append(...children.filter((child) => child !== undefined && child !== null));
    return node;
  }
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const short = (value) => (value === null || value === undefined ? "-" : String(Number(Number(value).toPrecision(4))));
  function moment(value, date) {
    if (!date) return short(value);
    const [day, hour] = new Date(value).toISOString().split("T");
    return `${day} ${hour.slice(0, 8)}`;
  }

  // ---- charts

  function scaleOf(spec, axis, isDown) {
    const scale = {
      type: axis.log ? "logarithmic" : "linear",
      title: { display: true, text: axis.label, color: css("muted") },
      grid: { color: css("grid") },
      ticks: { color: css("muted"), maxTicksLimit: NUM_TICKS, maxRotation: axis.cells ? 60 : 0, includeBounds: axis.tight !== true, precision: axis.whole ? 0 : undefined },
      min: axis.min,
      max: axis.max,
    };
    if (axis.date) datedTicks(scale);
    else if (axis.log) scale.ticks.callback = function (value) {
      // Few of a wide or narrow axis, so that no two overlap.
      const isCrowded = this.max / this.min > 500 || this.width < 300;
      return (isCrowded ? /^1e/ : /^[125]e/).test(value.toExponential()) ? value.toLocaleString("en") : null;
    };
    else scale.ticks.callback = (value) => short(value);
    if (spec.bars && !isDown) scale.offset = false; // as the lines above have it
    if (axis.cells) {
      const most = axis.cells.length > 24 ? 12 : 24;
      const step = Math.ceil(axis.cells.length / most);
      Object.assign(scale, { type: "linear", min: -0.5, max: axis.cells.length - 0.5, offset: false, reverse: isDown, grid: { display: false } });
      scale.afterBuildTicks = (self) => {
        self.ticks = axis.cells.map((_, place) => ({ value: place })).filter(({ value }) => value % step === 0);
      };
      Object.assign(scale.ticks, { autoSkip: axis.cells.length > 24, maxTicksLimit: 40, callback: (value) => cut(axis.cells[value] ?? "", 16) });
    }
    return scale;
  }
  // Ticks at whole days, hours, minutes or seconds; days without the hour, hours without the year.
  function datedTicks(scale) {
    const [second, minute, hour, day] = [1e3, 6e4, 36e5, 864e5];
    const steps = [...[1, 5, 15, 30].map((n) => n * second), ...[1, 5, 15, 30].map((n) => n * minute), ...[1, 3, 6, 12].map((n) => n * hour), ...[1, 2, 7, 14, 30, 91, 365, 1826, 3652].map((n) => n * day)];
    let step = day;
    scale.afterBuildTicks = (self) => {
      const most = Math.max(2, Math.min(NUM_TICKS, Math.floor(self.chart.width / 100)));
      step = steps.find((size) => (self.max - self.min) / size <= most) ?? steps.at(-1);
      const first = Math.ceil(self.min / step) * step;
      self.ticks = Array.from({ length: Math.max(0, Math.floor((self.max - first) / step) + 1) }, (_, k) => ({ value: first + k * step }));
    };
    scale.ticks.callback = (value) => {
      const said = moment(value, true);
      return step >= day ? said.slice(0, 10) : step >= minute ? said.slice(5, 16) : said.slice(11);
    };
  }
  const cut = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

  // Vertical lines, and bands such as that of near-critical damping.
  const marks = {
    id: "marks",
    beforeDatasetsDraw(chart, _, { rules = [], bands = [], levels = [] }) {
      const { ctx, chartArea: area, scales } = chart;
      ctx.save();
      ctx.fillStyle = css("edge");
      for (const band of bands) {
        const [a, b] = [band.from, band.to].map((value) => scales.y.getPixelForValue(value));
        ctx.globalAlpha = 0.6;
        ctx.fillRect(area.left, b, area.width, a - b);
      }
      ctx.globalAlpha = 1;
      ctx.setLineDash([4, 4]);
      ctx.strokeStyle = ctx.fillStyle = css("muted");
      ctx.font = "11px system-ui, sans-serif";
      for (const rule of rules) {
        const x = scales.x.getPixelForValue(rule.x);
        stroke(ctx, x, area.top, x, area.bottom);
        const isRight = x > area.right - 60;
        ctx.textAlign = isRight ? "right" : "left";
        if (rule.label) ctx.fillText(rule.label, x + (isRight ? -4 : 4), area.top + 10);
      }
      ctx.strokeStyle = ctx.fillStyle = css("c1");
      for (const level of levels) {
        const y = scales.y.getPixelForValue(level.y);
        stroke(ctx, area.left, y, area.right, y);
        ctx.textAlign = "left";
        ctx.fillText(level.label, area.left + 4, y - 4);
      }
      ctx.restore();
    },
    afterDatasetsDraw(chart, _, { numbers }) {
      if (!numbers) return;
      const { ctx, scales } = chart;
      ctx.save();
      ctx.font = "13px system-ui, sans-serif";
      ctx.textAlign = "center";
      ctx.textBaseline = "middle";
      const { data, backgroundColor } = chart.data.datasets[0];
      data.forEach(({ x, y, v }, place) => {
        const [r, g, b] = backgroundColor[place].match(/\d+/g).map(Number);
        ctx.fillStyle = 0.3 * r + 0.6 * g + 0.1 * b > 128 ? "#000000" : "#ffffff";
        ctx.fillText(short(v), scales.x.getPixelForValue(x), scales.y.getPixelForValue(y));
      });
      ctx.restore();
    },
  };
  function stroke(ctx, ...ends) {
    ctx.beginPath();
    ctx.moveTo(ends[0], ends[1]);
    ctx.lineTo(ends[2], ends[3]);
    ctx.stroke();
  }

  function lineSet(line, spec) {
    const colour = css(`c${line.colour ?? 0}`);
    const radius = line.radius ?? (line.dots ? (line.dots === "only" ? 4 : 3) : 0);
    const set = {
      label: line.name,
      data: line.x.map((x, place) => ({ x, y: line.y[place] })),
      borderColor: colour,
      backgroundColor: line.fill ? `${colour}40` : colour,
      borderWidth: line.width ?? 2,
      borderDash: line.dash ? [6, 4] : [],
      stepped: line.step ? "before" : false,
      pointRadius: radius,
      pointHoverRadius: line.dots ? 6 : 4,
      pointHitRadius: 8,
      pointStyle: line.marks ?? MARKS[line.mark ?? 0],
      pointRotation: line.turns ?? 0,
      pointBackgroundColor: line.inside ?? colour,
      pointBorderColor: line.outside ?? colour,
      showLine: line.dots !== "only",
      fill: line.fill ?? false,
      order: line.fill ? 1 : 0,
      tips: line.tips,
    };
    if (spec.bars) Object.assign(set, { barThickness: line.thickness ?? "flex", maxBarThickness: 32 });
    return set;
  }

  function configure(spec) {
    const isHeat = spec.kind === "heat";
    const options = {
      responsive: true,
      maintainAspectRatio: false,
      animation: false,
      interaction: { mode: "nearest", intersect: !isHeat && spec.lines.some((line) => line.dots === "only"), axis: isHeat ? "xy" : "x" },
      scales: { x: scaleOf(spec, spec.x, false), y: scaleOf(spec, spec.y, true) },
      plugins: {
        marks: { rules: spec.rules, bands: spec.bands, levels: spec.levels, numbers: spec.numbers },
        legend: { display: !isHeat && spec.lines.filter(({ name }) => name).length > 1, position: "bottom", labels: { color: css("ink"), usePointStyle: true, pointStyleWidth: 18, boxHeight: 8, generateLabels: legendOf } },
        tooltip: { callbacks: { title: () => "", label: (item) => tip(item, spec) } },
      },
      // Later, as it draws the charts anew, and this one has yet to end its own work on the click.
      onClick: spec.onpick && ((_, found) => found.length && setTimeout(() => spec.onpick(found[0].datasetIndex, found[0].index))),
    };
    const datasets = isHeat ? [heatSet(spec)] : spec.lines.map((line) => lineSet(line, spec));
    return { type: isHeat ? "matrix" : spec.bars ? "bar" : "line", data: { datasets }, options, plugins: [marks] };
  }
  function tip(item, spec) {
    const { x, y, v } = item.raw;
    const name = (axis, value) => (axis.cells ? axis.cells[value] : moment(value, axis.date));
    if (spec.kind === "heat") return [`${spec.x.label}: ${name(spec.x, x)}`, `${spec.y.label}: ${name(spec.y, y)}`, `${spec.label}: ${short(v)}`];
    const said = item.dataset.tips?.[item.dataIndex];
    const where = `${spec.x.label} ${name(spec.x, x)}, ${spec.y.label} ${short(y)}`;
    return [item.dataset.label ? `${item.dataset.label}: ${where}` : where, ...(said ? [said] : [])];
  }

  // A line for what is drawn as one, with its dashes; the mark for what is points alone.
  function legendOf(chart) {
    const all = Chart.defaults.plugins.legend.labels.generateLabels(chart);
    const named = all.filter(({ text }) => text !== "");
    for (const label of named) {
      const set = chart.data.datasets[label.datasetIndex];
      if (set.fill) label.pointStyle = "rect";
      else if (set.showLine) Object.assign(label, { pointStyle: "line", lineDash: set.borderDash, lineWidth: 2 });
      else label.pointStyle = Array.isArray(set.pointStyle) ? "circle" : set.pointStyle;
    }
    return named;
  }

  function shade(value, low, high, isDiverging) {
    const mix = (from, to, part) => {
      const [a, b] = [from, to].map((name) => css(name).split(",").map(Number));
      return `rgb(${a.map((channel, k) => Math.round(channel + part * (b[k] - channel))).join(",")})`;
    };
    if (isDiverging) {
      const top = Math.max(-low, high) || 1;
      return value < 0 ? mix("zero", "minus", -value / top) : mix("zero", "plus", value / top);
    }
    return mix("low", "high", high > low ? (value - low) / (high - low) : 0);
  }
  function bounds(spec) {
    const all = spec.z.flat().filter((value) => value !== null);
    return [Math.min(0, ...all), Math.max(0, ...all)];
  }
  function heatSet(spec) {
    const [low, high] = bounds(spec);
    const [nx, ny] = [spec.z.length, spec.z[0].length];
    const data = spec.z.flatMap((row, x) => row.map((v, y) => ({ x, y, v })));
    return {
      label: spec.label,
      data,
      backgroundColor: data.map(({ v }) => (v === null ? "transparent" : shade(v, low, high, spec.diverging))),
      borderWidth: 0,
      width: ({ chart }) => (chart.chartArea || {}).width / nx + 0.5,
      height: ({ chart }) => (chart.chartArea || {}).height / ny + 0.5,
    };
  }

  function figure(spec) {
    const canvas = el("canvas", { role: "img", "aria-label": `${spec.title}. ${spec.about || ""} The table below has the values.` });
    const redraw = () => {
      drawn.get(canvas)?.chart?.destroy();
      drawn.set(canvas, { chart: new Chart(canvas, configure(spec)), redraw });
    };
    const details = el("details", {}, el("summary", {}, "Values as a table"));
    details.addEventListener("toggle", () => details.children.length < 2 && details.append(valuesOf(spec)), { once: true });
    const plot = el("div", { class: "plot" }, canvas);
    if (spec.kind === "heat" && spec.y.cells.length <= 24) plot.style.height = `${Math.max(17, 6 + 1.15 * spec.y.cells.length)}rem`;
    const node = el("figure", {}, el("figcaption", {}, spec.title), spec.about ? el("p", {}, spec.about) : null, plot, spec.kind === "heat" ? key(spec) : null, details);
    return { node, redraw };
  }
  function key(spec) {
    const [low, high] = bounds(spec);
    const ends = spec.diverging ? [-Math.max(-low, high), Math.max(-low, high)] : [low, high];
    const bar = el("i", {});
    const parts = [0, 0.25, 0.5, 0.75, 1].map((part) => shade(ends[0] + part * (ends[1] - ends[0]), ends[0], ends[1], spec.diverging));
    bar.style.background = `linear-gradient(to right, ${parts.join(",")})`;
    return el("div", { class: "scale" }, short(ends[0]), bar, `${short(ends[1])}, ${spec.label}`);
  }
  function valuesOf(spec) {
    if (spec.kind === "heat") {
      const head = [spec.y.label, ...spec.x.cells];
      return table({ head, rows: spec.y.cells.map((name, y) => [name, ...spec.z.map((row) => short(row[y]))]) });
    }
    const name = (value) => (spec.x.cells ? spec.x.cells[value] : moment(value, spec.x.date));
    const rows = spec.lines.flatMap((line) => line.x.map((x, k) => [line.name, name(x), short(line.y[k])]));
    return table({ head: ["line", spec.x.label, spec.y.label], rows: rows.slice(0, 400) });
  }
  function table({ title, head, rows }, action) {
    const cells = (row) => row.map((item) => el("td", {}, item));
    const body = rows.map((row, place) => el("tr", {}, action ? el("td", {}, action(place)) : null, ...cells(row)));
    const top = el("tr", {}, action ? el("td", {}) : null, ...head.map((name) => el("th", { scope: "col" }, name)));
    const node = el("table", { class: action && "acts" }, el("thead", {}, top), el("tbody", {}, ...body));
    const box = el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": title || "values" }, node);
    return title ? el("div", { class: "card" }, el("h3", {}, title), box) : box;
  }
  function fill(holder, figures, ...others) {
    for (const canvas of holder.querySelectorAll("canvas")) {
      drawn.get(canvas)?.chart.destroy();
      drawn.delete(canvas);
    }
    holder.replaceChildren(...figures.map(({ node }) => node), ...others);
    for (const { redraw } of figures) redraw();
  }
  function choice(label, options, onchange) {
    const select = el("select", { onchange: () => onchange(select.selectedIndex) }, ...options.map((name) => el("option", {}, name)));
    return { node: el("label", {}, label, select), select };
  }

  // ---- sections that are a list of views

  function plainSection(item) {
    const holder = el("div", { class: "charts" });
    const chosen = item.choices.map(() => 0);
    const show = () => {
      const view = item.views[chosen.join(",")];
      fill(holder, (view.charts || []).map(figure), ...(view.tables || []).map((one) => table(one)));
    };
    const boxes = item.choices.map(({ label, options }, place) => choice(label, options, (index) => { chosen[place] = index; show(); }));
    const isIdle = ({ options }) => options.length < 2;
    boxes.forEach(({ node }, place) => { node.hidden = isIdle(item.choices[place]); node.style.display = node.hidden ? "none" : ""; });
    return { node: [boxes.length ? el("div", { class: "choices" }, ...boxes.map(({ node }) => node)) : null, holder], show };
  }

  // ---- single series

  function explorer(item) {
    const state = { series: 0, variable: 0, layer: 0, head: 0, output: 0, step: 0, out: null };
    const [bar, charts, tables] = [el("div", { class: "choices" }), el("div", { class: "charts" }), el("div", { class: "charts" })];
    const readout = el("p", { class: "readout", "aria-live": "polite" });
    const one = () => item.series[state.series];
    const steps = () => one().steps || [];
    const now = () => steps()[state.step] ?? Infinity;
    const time = { ...item.time, tight: true }; // with the ends of the series, which are no ticks
    let timer = null;
    let [order, variables] = [[], null]; // variables of the series, the heaviest first, and their box

    const slider = el("input", { type: "range", min: 0, step: 1, "aria-label": "Time up to which is shown", oninput: () => { state.step = Number(slider.value); stop(); update(); } });
    const clock = el("output", {});
    const play = el("button", { type: "button", "aria-pressed": "false", onclick: () => (timer ? stop() : start()) }, "▶ Play");
    const player = el("div", { class: "player" }, play, slider, clock);
    function start() {
      if (state.step >= steps().length - 1) state.step = 0;
      play.setAttribute("aria-pressed", "true");
      play.textContent = "❚❚ Pause";
      timer = setInterval(() => { if (state.step >= steps().length - 1) return stop(); state.step += 1; update(); }, 300);
    }
    function stop() {
      clearInterval(timer);
      timer = null;
      play.setAttribute("aria-pressed", "false");
      play.textContent = "▶ Play";
    }

    // Effects of observations on the chosen output, the largest first.
    const effect = (variable, k) => (variable.without?.[k] ? one().final[state.output] - variable.without[k][state.output] : variable.hidden?.[k] ? variable.y[k] - variable.hidden[k][0] : null);
    function effects() {
      const all = one().variables.flatMap((variable, v) => variable.x.map((_, k) => ({ v, k, effect: effect(variable, k) })));
      return all.filter((entry) => entry.effect !== null).sort((a, b) => Math.abs(b.effect) - Math.abs(a.effect));
    }
    function byWeight() {
      const totals = one().variables.map(() => 0);
      for (const entry of effects()) totals[entry.v] += Math.abs(entry.effect);
      return totals.map((_, v) => v).sort((a, b) => totals[b] - totals[a]);
    }

    function reset() {
      Object.assign(state, { step: Math.max(0, steps().length - 1), out: null, output: 0, layer: 0, head: 0 });
      order = byWeight();
      state.variable = order[0] ?? 0;
      slider.max = Math.max(0, steps().length - 1);
      const room = 0.02 * (one().span[1] - one().span[0]);
      [time.min, time.max] = [one().span[0] - room, one().span[1] + room];
      const names = item.series.map(({ id, truth }) => (truth ? `${id} (true: ${truth})` : id));
      const boxes = [choice("Series", names, (index) => { stop(); state.series = index; reset(); update(); })];
      boxes[0].select.selectedIndex = state.series;
      if (one().outputs.length > 1 && item.task !== "events") boxes.push(choice("Output", one().outputs, (index) => { state.output = index; state.out = null; update(); }));
      variables = choice("Variable", order.map((v) => one().variables[v].name), (index) => { state.variable = order[index]; state.out = null; update(); });
      if (order.length) boxes.push(variables);
      const layers = one().attention || [];
      if (layers.length > 1) boxes.push(choice("Layer", layers.map(({ name }) => name), (index) => { state.layer = index; update(); }));
      if (layers.length && layers[0].heads.length > 1) boxes.push(choice("Head", layers[0].heads.map((_, k) => String(k + 1)), (index) => { state.head = index; update(); }));
      bar.replaceChildren(...boxes.map(({ node }) => node));
      player.style.display = steps().length > 1 && item.task !== "imputation" ? "" : "none";
    }

    function pick(v, k) {
      const isSame = state.out && state.out.v === v && state.out.k === k;
      if (state.variable !== v) {
        state.variable = v;
        variables.select.selectedIndex = order.indexOf(v);
      }
      state.out = isSame ? null : { v, k };
      update();
    }

    const rules = () => (item.task === "imputation" || now() === Infinity ? [] : [{ x: now(), label: "" }]);
    const observed = (variable, options) => ({ name: "observed", x: variable.x, y: variable.y, colour: 6, dots: "only", inside: variable.x.map((x) => (x <= now() ? css("c6") : "transparent")), ...options });

    function said() {
      const data = one();
      if (data.along) {
        const without = state.out && one().variables[state.out.v].without?.[state.out.k];
        const levels = without ? [{ y: without[state.output], label: "without the observation" }] : [];
        const lines = data.along.map((y, k) => ({ name: data.outputs[k], x: steps(), y, step: true, colour: k, dots: true, radius: steps().map((x) => (x <= now() ? 3 : 0)) }));
        const y = item.task === "classification" ? { label: "probability", min: 0, max: 1 } : { label: "prediction" };
        return [{ title: "Prediction along time", about: "", kind: "lines", x: time, y, lines, rules: rules(), levels }];
      }
      if (data.rates) {
        const lines = data.outputs.map((name, k) => ({ name, x: data.rates.x, y: data.rates.y[k], colour: k, dash: k % 2 === 1 }));
        const ticks = data.events.map((events, k) => ({ name: "", x: events.x, y: events.x.map(() => 0), colour: k, dots: "only", mark: k, outside: events.x.map((x) => (x <= now() ? css(`c${k}`) : "transparent")), inside: events.x.map((x) => (x <= now() ? css(`c${k}`) : "transparent")) }));
        return [{ title: "Rates of events along time", about: "The marks at 0 are the events.", kind: "lines", x: time, y: { label: "events per unit of time" }, lines: [...lines, ...ticks], rules: rules() }];
      }
      const target = data.outputs[state.output];
      const curves = data.filled || data.ahead[state.step];
      const [low, middle, high] = curves.quantiles.map((one) => one[state.output]);
      const lines = [
        { name: "", x: curves.x, y: low, colour: 0, width: 0 },
        { name: `${Math.round(100 * (data.levels[1] - data.levels[0]))} % interval`, x: curves.x, y: high, colour: 0, width: 0, fill: "-1" },
        { name: "median", x: curves.x, y: middle, colour: 0 },
      ];
      const v = data.variables.findIndex(({ name }) => name === target);
      if (v >= 0) lines.push(observed(data.variables[v]));
      const out = state.out && data.variables[state.out.v];
      if (out?.hidden?.[state.out.k]) lines.push({ name: "without the observation", x: [out.x[state.out.k]], y: [out.hidden[state.out.k][0]], colour: 1, dots: "only", mark: 2, radius: 7 });
      const title = data.filled ? "What the model says at any time" : "Forecast from what is known";
      return [{ title: `${title}: ${target}`, about: "", kind: "lines", x: time, y: { label: target }, lines, rules: rules() }];
    }

    function seen() {
      const variable = one().variables[state.variable];
      if (!variable) return [];
      const found = variable.x.map((_, k) => effect(variable, k));
      const top = Math.abs(effects()[0]?.effect ?? 0) || 1;
      const colour = (k) => (found[k] === null ? css("c6") : css(found[k] > 0 ? "c1" : "c0"));
      const isOut = (k) => state.out && state.out.v === state.variable && state.out.k === k;
      const points = {
        name: "observed", x: variable.x, y: variable.y, colour: 6, dots: "only", width: 1,
        marks: found.map((value) => (value === null ? "circle" : "triangle")),
        turns: found.map((value) => (value < 0 ? 180 : 0)),
        radius: found.map((value) => 4 + 8 * Math.sqrt(Math.abs(value ?? 0) / top)),
        inside: variable.x.map((x, k) => (isOut(k) || x > now() ? "transparent" : colour(k))),
        outside: variable.x.map((_, k) => (isOut(k) ? css("ink") : colour(k))),
        tips: found.map((value) => (value === null ? "" : `adds ${value > 0 ? "+" : ""}${short(value)}; click to take it out`)),
      };
      const thread = { name: "", x: variable.x, y: variable.y, colour: 6, width: 0.75 };
      const about = item.task === "imputation"
        ? "▲ above, ▼ below what the model would say without it; larger is further off. Click one to take it out."
        : "▲ raises and ▼ lowers the prediction; larger is more. Click one to take it out.";
      const rest = found.includes(null) && item.task !== "events" ? " Where there is a ●, it was not tried." : "";
      return [{ title: `Observations: ${variable.name}`, about: about + rest, kind: "lines", x: time, y: { label: variable.name }, lines: [points, thread], rules: rules(), onpick: (_, k) => pick(state.variable, k) }];
    }

    function attended() {
      const layer = one().attention?.[state.layer];
      if (!layer) return [];
      const [keys, weights] = layer.heads[state.head][state.step];
      const bars = { name: "weight", x: keys.map((k) => one().times[k]), y: weights.map((w) => w / 1000), colour: 2, thickness: 4 };
      const about = `Of the row at the vertical line, layer ${layer.name}, head ${state.head + 1}.`;
      return [{ title: "Attention to earlier rows", about, kind: "lines", bars: true, x: time, y: { label: "weight", min: 0 }, lines: [bars], rules: rules() }];
    }

    function responded() {
      const found = one().response;
      const chosen = one().variables[state.variable];
      if (!found) return [];
      const shown = found.variables.find(({ column }) => column === chosen?.column) ?? found.variables[0];
      const cells = found.x.map((x) => (time.date ? moment(x, true).slice(5, 16) : String(Number(x.toPrecision(3)))));
      const about = `${shown.column === chosen?.column ? "" : `The response of ${chosen?.name} was left out of the page. `}How strongly oscillators of each period swing when the series drives them.`;
      return [{ title: `Response of resonators: ${shown.name}`, about, kind: "heat", x: { label: time.label, cells }, y: { label: "period", cells: found.periods }, z: shown.z, label: "amplitude, in spreads" }];
    }

    function lists() {
      const top = effects().slice(0, 12);
      const isFilled = item.task === "imputation";
      const value = ({ v, k }) => (isFilled ? one().variables[v].hidden[k][0] : one().variables[v].without[k][state.output]);
      const rows = top.map((entry) => {
        const variable = one().variables[entry.v];
        return [variable.name, moment(variable.x[entry.k], time.date), short(variable.y[entry.k]), `${entry.effect > 0 ? "+" : ""}${short(entry.effect)}`, short(value(entry))];
      });
      const parts = [];
      if (rows.length) {
        const head = ["variable", time.label, "value", isFilled ? "off by" : "adds", isFilled ? "model says" : "without it"];
        const action = (place) => {
          const { v, k } = top[place];
          const isOut = state.out && state.out.v === v && state.out.k === k;
          return el("button", { type: "button", "aria-pressed": isOut ? "true" : "false", "data-take": place, onclick: () => { pick(v, k); tables.querySelector(`[data-take="${place}"]`)?.focus(); } }, isOut ? "Put back" : "Take out");
        };
        parts.push(table({ title: isFilled ? "The most surprising observations" : "Observations that count most", head, rows }, action));
      }
      if (one().periods) parts.push(table({ title: "Which variable at which period, to the resonators", head: ["variable", "period", "share"], rows: one().periods }));
      const heard = one().attention?.[state.layer].periods?.[state.head];
      if (heard) parts.push(table({ title: `Periods at which the last row listens: layer ${one().attention[state.layer].name}, head ${state.head + 1}`, head: ["period of the channel", "share of the logits"], rows: heard }));
      return parts;
    }

    function tell() {
      const data = one();
      const words = [];
      if (data.along) words.push(`At ${moment(now(), time.date)}: ${data.outputs.map((name, k) => `${name} = ${short(data.along[k][state.step])}`).join(", ")}.`);
      if (data.ahead) words.push(`Forecast made at ${moment(now(), time.date)}: ${data.outputs[state.output]} = ${short(data.ahead[state.step].quantiles[1][state.output].at(-1))} at its end.`);
      if (data.rates) {
        const place = Math.max(0, data.rates.x.findLastIndex((x) => x <= now()));
        words.push(`At ${moment(now(), time.date)}, rates: ${data.outputs.map((name, k) => `${name} = ${short(data.rates.y[k][place])}`).join(", ")}.`);
      }
      if (state.out) {
        const variable = data.variables[state.out.v];
        const what = `${variable.name} ${short(variable.y[state.out.k])} at ${moment(variable.x[state.out.k], time.date)}`;
        if (variable.hidden?.[state.out.k]) {
          const [middle, low, high] = variable.hidden[state.out.k];
          words.push(`Without ${what} the model would say ${short(middle)} (${short(low)} to ${short(high)}).`);
        } else if (variable.without?.[state.out.k]) {
          words.push(`Without ${what} the prediction of the whole series would go from ${short(data.final[state.output])} to ${short(variable.without[state.out.k][state.output])}.`);
        } else words.push(`${what} was not tried.`);
      } else if (effects().length) words.push("Take an observation out to see what it adds.");
      readout.textContent = words.join(" ");
      readout.hidden = words.length === 0;
    }

    function update() {
      slider.value = state.step;
      clock.textContent = now() === Infinity ? "" : moment(now(), time.date);
      slider.setAttribute("aria-valuetext", clock.textContent);
      tell();
      fill(charts, [...said(), ...seen(), ...attended(), ...responded()].map(figure));
      tables.replaceChildren(...lists());
    }
    const show = () => { reset(); update(); };
    return { node: [bar, player, readout, charts, tables], show };
  }

  // ---- the page

  const main = document.getElementById("main");
  document.getElementById("facts").append(...page.facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
  document.getElementById("nav").append(...page.sections.map(({ id, title }) => el("a", { href: `#${id}` }, title)));
  Chart.defaults.font.family = "system-ui, sans-serif";
  for (const item of page.sections) {
    const { node, show } = item.series ? explorer(item) : plainSection(item);
    const heading = el("h2", { id: `${item.id}-title` }, item.title);
    main.append(el("section", { id: item.id, "aria-labelledby": `${item.id}-title` }, heading, el("p", {}, item.about), ...node.filter(Boolean)));
    show();
  }
  const redraw = () => [...drawn.values()].forEach((entry) => entry.redraw());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  matchMedia("print").addEventListener("change", redraw);
  document.documentElement.dataset.drawn = Math.round(performance.now()); // ms since it was asked for
})();
