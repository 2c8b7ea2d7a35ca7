"use strict";
// The page is whole without this: it sorts the table, lets another row be 1.00, and shows the curve of a row.
const table = document.querySelector("#jobs table");
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
