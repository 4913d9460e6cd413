for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") !== "descending";
    heads.forEach(other => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const key = row => row.cells[column].dataset.v ?? row.cells[column].textContent;
    const order = (a, b) => head.classList.contains("n")
      ? Number(key(a)) - Number(key(b)) : key(a).localeCompare(key(b));
    const rows = [...table.tBodies[0].rows].sort((a, b) => down ? order(b, a) : order(a, b));
    table.tBodies[0].append(...rows);
  }));
}
