// Sorts a table by a click on a heading; switches the theme. Nothing is loaded from anywhere.
"use strict";

function sortBy(table, index, heading) {
  const body = table.tBodies[0];
  const ascending = heading.getAttribute("aria-sort") !== "ascending";
  const key = (row) => {
    const cell = row.cells[index];
    const number = cell.dataset.value === undefined || cell.dataset.value === "" ? NaN : Number(cell.dataset.value);
    return Number.isNaN(number) ? cell.textContent.trim() : number;
  };
  const isEmpty = (value) => value === "";
  const rows = Array.from(body.rows).map((row) => [key(row), row]);
  rows.sort(([a], [b]) => {
    if (isEmpty(a) || isEmpty(b)) return isEmpty(a) - isEmpty(b);  // empty cells stay last
    const order = typeof a === "number" && typeof b === "number"
      ? a - b : String(a).localeCompare(String(b), undefined, { numeric: true });
    return ascending ? order : -order;
  });
  body.append(...rows.map(([, row]) => row));
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", ascending ? "ascending" : "descending");
}

for (const table of document.querySelectorAll("table[data-name]")) {
  Array.from(table.tHead.rows[0].cells).forEach((heading, index) => {
    heading.querySelector("button").addEventListener("click", () => sortBy(table, index, heading));
  });
}

document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const isDark = root.dataset.theme
    ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
});
