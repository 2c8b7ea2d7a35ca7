"use strict";
// The page is whole without this: it sorts the table, lets another row be 1.00, shows the curve of a row, draws any
// curve with its values, and follows a sweep that runs.
const find = (selector) => document.querySelector(selector);
const table = find("#jobs table");
const body = table.tBodies[0];

const sortable = (cell) => {
  const value = cell.dataset.v ?? cell.textContent.trim();
  return cell.dataset.v ? Number(value) : value;
};

const isMissing = (value) => value === "" || value === "\u2013";

const compare = (a, b) => {
  if (isMissing(a) || isMissing(b)) return 0;
  if (typeof a === "number" && typeof b === "number") return a - b;
  return String(a).localeCompare(String(b), "en", { numeric: true });
};

table.tHead.addEventListener("click", (event) => {
  const head = event.target.closest("button")?.closest("th");
  if (!head) return;
  const down = head.getAttribute("aria-sort") === "ascending";
  for (const each of head.parentNode.cells) each.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const rows = [...body.rows].map((row) => ({ row, value: sortable(row.cells[head.cellIndex]) }));
  rows.sort((a, b) => isMissing(a.value) - isMissing(b.value) || (down ? -1 : 1) * compare(a.value, b.value));
  body.append(...rows.map(({ row }) => row));
});

body.addEventListener("change", (event) => {
  const chosen = event.target.closest("tr");
  const base = chosen.cells;
  for (const path of document.querySelectorAll("path[data-j]")) {
    path.classList.toggle("chosen", path.dataset.j === chosen.dataset.j);
    if (path.dataset.j === chosen.dataset.j) path.parentNode.append(path);
  }
  for (const row of body.rows) {
    for (const cell of row.cells) {
      const shown = cell.querySelector("i");
      if (!shown) continue;
      const of = Number(base[cell.cellIndex].dataset.v);
      shown.textContent = of ? (Number(cell.dataset.v) / of).toFixed(2) : "";
    }
  }
});

// What a curve without a title is: its job, and the settings of its row.
const describe = (path) => {
  const row = body.querySelector(`[data-j="${Number(path.dataset.j)}"]`);
  const heads = [...table.tHead.rows[0].cells].map((cell) => cell.querySelector("[title]"));
  const settings = heads.map((head, number) => head && `${head.lastChild.textContent}=${row.cells[number].textContent}`);
  const title = document.createElementNS(path.namespaceURI, "title");
  title.textContent = `job ${row.querySelector("th").textContent}: ${settings.filter(Boolean).join(" ")}`;
  path.append(title);
};

const lit = new Set();

const show = (event) => {
  const place = event.target.closest("[data-j]")?.dataset.j;
  for (const each of lit) each.classList.remove("lit");
  lit.clear();
  if (place === undefined) return;
  if (event.target.matches("path:empty")) describe(event.target);
  for (const each of document.querySelectorAll(`[data-j="${Number(place)}"]`)) {
    each.classList.add("lit");
    lit.add(each);
    if (each.tagName === "path" && each !== event.target) each.parentNode.append(each);
  }
};

for (const kind of ["pointerover", "focusin"]) document.addEventListener(kind, show);

// Any curve: the values come as 16 bits each, from the least of a metric to its most.
const section = find("#loss");
const select = find("#curve");
const log = find("#log");
const picture = find("#drawn .picture");
const data = section && JSON.parse(find("#curves").textContent);
const axes = { step: "steps", tokens: "tokens", train_s: "seconds of training" };
const FEW = 8;
let drawn = null;
let shown = null;

const unpack = (name) => {
  const { low, high, log: isLog, jobs } = data.curves[name];
  return Object.entries(jobs).map(([place, [number, text]]) => {
    const bytes = Uint8Array.from(atob(text), (each) => each.charCodeAt(0));
    const codes = [...new Uint16Array(bytes.buffer)];
    const values = codes.map((code) => (code === 65535 ? NaN : low + (code / 65534) * (high - low)));
    const steps = data.steps[number];
    return { place, key: number + text, points: values.map((value, at) => [steps[at], isLog ? Math.exp(value) : value]) };
  });
};

const short = (value, digits = 4) => {
  const size = Math.abs(value);
  if (!size || (size >= 1e-3 && size < 1e4)) return String(Number(value.toPrecision(digits)));
  const [unit, name] = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]].find(([least]) => size >= least) ?? [1, ""];
  return size >= 1e15 || size < 1e-3 ? value.toExponential(Math.max(0, digits - 2)) : Number((value / unit).toPrecision(digits)) + name;
};

// The steps of a line as tokens or seconds, from the curve of these.
const over = (points, place, axis, others) => {
  if (axis === "step") return points;
  const known = [[0, 0], ...(others.find((line) => line.place === place)?.points ?? [])];
  return points.flatMap(([step, value]) => {
    const after = known.findIndex(([other]) => other >= step);
    if (after < 0) return known.length > 1 ? [[known.at(-1)[1], value]] : [];
    const [[x0, y0], [x1, y1]] = [known[Math.max(0, after - 1)], known[after]];
    return [[x1 > x0 ? y0 + ((step - x0) / (x1 - x0)) * (y1 - y0) : y1, value]];
  });
};

const ticks = (low, high) => {
  if (log.checked) {
    const all = [];
    const factors = high / low > 1e3 ? [1] : high / low > 5 ? [1, 2, 5] : [1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += 1) all.push(...factors.map((each) => each * 10 ** power));
    const within = all.filter((value) => value >= low && value <= high);
    if (within.length > 1) return within.filter((_, at) => at % Math.ceil(within.length / 8) === 0);
  }
  const rough = (high - low) / 5;
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * unit).find((each) => each >= rough * 0.9);
  return Array.from({ length: 11 }, (_, at) => step * (Math.ceil(low / step - 1e-9) + at)).filter((value) => value <= high * (1 + 1e-9) || value <= high);
};

const element = (parent, name, attributes, text = "") => {
  const made = parent.namespaceURI.endsWith("svg") ? document.createElementNS(parent.namespaceURI, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) if (key !== "style") made.setAttribute(key, value);
  Object.assign(made.style, attributes.style);
  made.textContent = text;
  parent.append(made);
  return made;
};

const jobOf = (place) => body.querySelector(`[data-j="${Number(place)}"] th`).firstChild.textContent;

const nameOf = (places) => {
  const names = places.map((place) => data.names[place]);
  const jobs = places.map(jobOf);
  const heads = new Set(names.map((name) => name.split("=")[0]));
  const joined = heads.size === 1 && !names.some((name) => name.includes(" ")) ? names.map((name, at) => (at ? name.split("=")[1] : name)).join(", ") : names.join(", ");
  const common = names[0].split(" ").filter((word) => names.every((name) => name.split(" ").includes(word))).join(" ");
  if (common && common.length <= 30 && places.length > 1) return `${common}, ${places.length} jobs`;
  if (names.every(Boolean) && joined.length <= 40) return joined;
  return places.length > 1 ? `${places.length} jobs: ${jobs.slice(0, 6).join(", ")}${places.length > 6 ? "\u2026" : ""}` : `job ${jobs[0]}`;
};

const draw = () => {
  const name = select.value;
  const axis = find('[name="x"]:checked')?.value ?? "step";
  const others = axis !== "step" && data.curves[axis] ? unpack(axis) : [];
  const groups = new Map();
  for (const { place, key, points } of unpack(name)) {
    const line = groups.get(key + (axis === "step" ? "" : place)) ?? { places: [], points: over(points, place, axis, others) };
    line.places.push(place);
    groups.set(key + (axis === "step" ? "" : place), line);
  }
  const isShown = ([x, y]) => Number.isFinite(x) && Number.isFinite(y) && (!log.checked || y > 0);
  const lines = [...groups.values()].filter((line) => line.points.some(isShown));
  const best = body.querySelector("tr.best")?.dataset.j;
  const all = lines.flatMap((line) => line.points.filter(isShown));
  const values = all.map((point) => point[1]).sort((a, b) => a - b);
  let [low, high] = values.length ? [values[0], values.at(-1)] : [1, 10];
  const right = all.reduce((most, point) => Math.max(most, point[0]), 0) || 1;
  const late = all.filter((point) => point[0] >= right / 4).map((point) => point[1]).sort((a, b) => a - b);
  const ninth = late[Math.ceil(0.9 * (late.length - 1))];
  const isCut = !log.checked && late.length > 5 && ninth > low && high > low + 2.2 * (ninth - low);
  if (isCut) high = low + 2.2 * (ninth - low);
  if (!(high > low * (1 + 1e-9)) && high - low <= Math.abs(high) * 1e-9) [low, high] = low > 0 ? [low / 2, high * 1.5] : [low * 1.5 - 0.5, high / 2 + 0.5];
  else if (log.checked) [low, high] = [low * (low / high) ** 0.04, high * (high / low) ** 0.04];
  else [low, high] = [low - 0.04 * (high - low), high + 0.04 * (high - low)];
  const scale = log.checked ? Math.log : (value) => value;
  const top = (value) => 1 - (scale(value) - scale(low)) / (scale(high) - scale(low));
  const [few, svg] = [lines.length <= FEW, picture.querySelector("svg")];
  const [left, ends, below] = ["left", "ends", "below"].map((each) => find(`#drawn .${each}`));
  for (const each of [svg, left, ends, below]) each.replaceChildren();
  for (const lost of picture.querySelectorAll(".lost")) lost.remove();
  const marks = ticks(low, high);
  for (const value of marks) element(left, "span", { style: { top: `${100 * top(value)}%` } }, short(value));
  element(svg, "path", { class: "grid", d: marks.map((value) => `M0 ${Math.round(400 * top(value))}h1000`).join("") });
  const wasLog = log.checked;
  log.checked = false;
  for (const value of ticks(0, right)) element(below, "span", { style: { left: `${(100 * value) / right}%` }, ...(value > 0.95 * right && { class: "last" }) }, short(value));
  log.checked = wasLog;
  const other = element(svg, "g", { class: "other" });
  lines.sort((a, b) => a.places.includes(best) - b.places.includes(best));
  for (const line of lines) {
    line.isBest = line.places.includes(best);
    line.style = few ? `c${line.places[0] % FEW}` : line.isBest ? "best" : "";
    line.spots = line.points.map((point) => isShown(point) && [(1000 * point[0]) / right, 400 * Math.min(1.5, Math.max(-0.5, top(point[1])))]);
    let path = "";
    line.spots.forEach((spot, at) => { if (spot) path += `${at && line.spots[at - 1] ? "L" : "M"}${spot[0].toFixed(1)} ${spot[1].toFixed(1)}`; });
    element(few || line.isBest ? svg : other, "path", { class: line.style, d: path, "data-j": line.places[0] });
    if (few && line.points.length <= 12) element(svg, "path", { class: `dots ${line.style}`, d: line.spots.filter(Boolean).map((spot) => `M${spot[0].toFixed(1)} ${spot[1].toFixed(1)}h0`).join("") });
    line.end = line.spots.findLast(Boolean);
    line.isLost = !Number.isFinite(line.points.at(-1)[1]);
    if (line.isLost && lines.length <= 40) element(picture, "b", { class: `lost ${line.style}`, "aria-hidden": "true", style: { left: `${line.end[0] / 10}%`, top: `${line.end[1] / 4}%` } }, "\u00d7");
  }
  const isOne = body.rows.length === 1;
  picture.parentNode.className = `frame${isOne ? " alone" : few ? "" : " many"}`;
  ends.hidden = isOne;
  const labelled = lines.filter((line) => few || line.isBest).sort((a, b) => a.end[1] - b.end[1]);
  const tops = labelled.map((line) => Math.min(1, Math.max(0, line.end[1] / 400)));
  tops.forEach((at, number) => { tops[number] = Math.max(at, number ? tops[number - 1] + 0.075 : 0); });
  for (let number = tops.length - 1, most = 1; number >= 0; number -= 1) { tops[number] = Math.min(tops[number], most); most = tops[number] - 0.075; }
  labelled.forEach((line, number) => {
    const label = element(ends, "span", { "data-j": line.places[0], style: { top: `${100 * tops[number]}%` } });
    element(label, "i", { class: `line ${line.style}` });
    label.append(`${few ? nameOf(line.places) : `best: job ${jobOf(best)}`}${line.isLost ? " \u00d7" : ""}`);
  });
  const num = lines.reduce((sum, line) => sum + line.places.length, 0);
  const words = `${name} of ${num} ${num === 1 ? "job" : "jobs"} over ${axes[axis]}${log.checked ? ", on a log axis" : ""}`;
  svg.setAttribute("aria-label", `${words}, from ${short(values[0] ?? 0)} to ${short(values.at(-1) ?? 0)}`);
  find("#drawn figcaption").textContent = `${words}. Point at a curve, or use the arrow keys, to read values.${few ? "" : " Of so many jobs the best has the colour; point at a row of the table, or choose it, to see its curve."}${isCut ? ` Values above ${short(high)} are cut off.` : ""}${log.checked && values.length < lines.flatMap((line) => line.points).filter((point) => Number.isFinite(point[1])).length ? " Values of 0 and below have no place on it." : ""}`;
  drawn = { lines, axis };
  hide();
};

const hide = () => {
  shown = null;
  for (const each of picture.querySelectorAll(".dot, .tip")) each.hidden = true;
};

const tell = (line, at) => {
  const spot = line?.spots[at];
  if (!spot) return;
  shown = { line, at };
  const [dot, tip] = [picture.querySelector(".dot"), picture.querySelector(".tip")];
  const place = { left: `${spot[0] / 10}%`, top: `${Math.min(100, Math.max(0, spot[1] / 4))}%` };
  Object.assign(dot.style, place);
  const names = nameOf(line.places);
  const who = line.places.length > 1 || names.startsWith("job ") ? names : `job ${jobOf(line.places[0])}, ${names}`;
  tip.textContent = `${who}: ${drawn.axis === "step" ? "step" : axes[drawn.axis]} ${short(line.points[at][0], 6)}, ${select.value} ${short(line.points[at][1], 5)}`;
  Object.assign(tip.style, place, { transform: `translate(${spot[0] > 500 ? "calc(-100% - .6rem)" : ".6rem"}, ${spot[1] > 200 ? "calc(-100% - .4rem)" : ".4rem"})` });
  for (const each of [dot, tip]) each.hidden = false;
};

const point = (event) => {
  const box = picture.getBoundingClientRect();
  let [nearest, found] = [Infinity, null];
  for (const line of drawn.lines) {
    line.spots.forEach((spot, at) => {
      if (!spot) return;
      const distance = Math.hypot((spot[0] / 1000) * box.width - event.clientX + box.left, (spot[1] / 400) * box.height - event.clientY + box.top);
      if (distance < nearest) [nearest, found] = [distance, [line, at]];
    });
  }
  if (found) tell(...found);
};

const walk = (event) => {
  const side = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  const aside = { ArrowUp: -1, ArrowDown: 1 }[event.key];
  if (event.key === "Escape") hide();
  if ((!side && !aside) || !drawn.lines.length) return;
  event.preventDefault();
  const { lines } = drawn;
  const line = shown ? shown.line : lines.at(-1);
  if (!shown) return tell(line, line.spots.findLastIndex(Boolean));
  if (side) {
    let at = shown.at + side;
    while (at >= 0 && at < line.spots.length && !line.spots[at]) at += side;
    return tell(line, at);
  }
  const next = lines[(lines.indexOf(line) + aside + lines.length) % lines.length];
  return tell(next, next.spots.reduce((best, spot, at) => (spot && Math.abs(spot[0] - line.spots[shown.at][0]) < Math.abs((next.spots[best] || [Infinity])[0] - line.spots[shown.at][0]) ? at : best), 0));
};

if (section && Object.keys(data.curves).length) {
  for (const name of Object.keys(data.curves)) element(select, "option", {}, name);
  section.classList.add("chosen");
  section.querySelector("h2").textContent = "Curves";
  for (const each of section.querySelectorAll("#drawn, label[hidden]")) each.hidden = false;
  section.addEventListener("change", draw);
  picture.addEventListener("pointermove", point);
  picture.addEventListener("pointerdown", point);
  picture.addEventListener("pointerleave", hide);
  picture.addEventListener("keydown", walk);
  picture.addEventListener("blur", hide);
}

// What a user has chosen stays over a reload: it is kept in the entry of the browser's history.
const scrolls = () => [...document.querySelectorAll(".scroll")];
const keep = () => {
  const head = table.querySelector("[aria-sort]");
  const chosen = body.querySelector('[name="reference"]:checked')?.value;
  history.replaceState({
    curve: select?.value, log: log?.checked, x: find('[name="x"]:checked')?.value, chosen,
    sort: head && [head.cellIndex, head.getAttribute("aria-sort")],
    y: window.scrollY, inner: scrolls().map((each) => [each.scrollLeft, each.scrollTop]),
  }, "");
};

const was = history.state;
history.scrollRestoration = "manual";
if (was) {
  if (data?.curves[was.curve]) select.value = was.curve;
  if (log) log.checked = Boolean(was.log);
  const x = [...document.querySelectorAll('[name="x"]')].find((each) => each.value === was.x);
  if (x) x.checked = true;
  const head = was.sort && table.tHead.rows[0].cells[was.sort[0]]?.querySelector("button");
  if (head) {
    head.closest("th").removeAttribute("aria-sort");
    head.click();
    if (was.sort[1] === "descending") head.click();
  }
  const radio = [...body.querySelectorAll('[name="reference"]')].find((each) => each.value === was.chosen);
  if (radio && !radio.checked) radio.click();
}
if (section && Object.keys(data.curves).length) draw();
if (was) {
  scrolls().forEach((each, at) => each.scrollTo(...(was.inner[at] ?? [0, 0])));
  window.scrollTo({ top: was.y, behavior: "instant" });
}
window.addEventListener("beforeunload", keep);

// While a sweep runs, its driver writes this page again. A page that nobody has written for minutes has no driver.
const [EVERY_MS, STALE_MS] = [15000, 300000];
const follow = () => {
  if (document.hidden || shown || document.activeElement === select) return void setTimeout(follow, 1000);
  keep();
  location.reload();
};
if (Date.now() - Number(document.body.dataset.live ?? 0) < STALE_MS) setTimeout(follow, EVERY_MS);
