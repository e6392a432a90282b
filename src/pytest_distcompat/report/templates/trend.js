"use strict";
const root = document.documentElement, filters = document.getElementById("filters");
document.getElementById("theme").addEventListener("click", () => {
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});
const rows = [...document.querySelectorAll(".trend tr")].map((row) => [row, row.textContent.toLowerCase()]);
const filter = () => {
  const { text, kind } = Object.fromEntries(new FormData(filters));
  for (const [row, words] of rows) row.hidden = !words.includes(text.toLowerCase()) || Boolean(kind && row.dataset.kind) && row.dataset.kind !== kind;
};
for (const name of ["input", "reset"]) filters.addEventListener(name, () => setTimeout(filter));
filters.addEventListener("submit", (event) => event.preventDefault());
