const unfold = () => {
  const part = location.hash && document.querySelector(location.hash)?.closest("details");
  if (part) part.open = true;
};
addEventListener("hashchange", unfold);
document.querySelectorAll("nav a").forEach(link => link.addEventListener("click", () =>
  document.querySelector(link.hash).closest("details").open = true));
addEventListener("beforeprint", () =>
  document.querySelectorAll("details.part").forEach(part => part.open = true));
unfold();
for (const box of document.querySelectorAll(".tabled")) {
  const table = box.querySelector("table"), body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.firstElementChild.addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") !== "descending";
    heads.forEach(other => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const key = row => row.cells[column].dataset.v ?? row.cells[column].textContent;
    const order = (a, b) => head.classList.contains("n")
      ? Number(key(a)) - Number(key(b)) : key(a).localeCompare(key(b));
    const rows = [...body.rows].sort((a, b) => down ? order(b, a) : order(a, b));
    body.append(...rows);
  }));
  const input = box.querySelector("input"), count = box.querySelector("output");
  const filter = () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of body.rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every(word => text.includes(word));
      shown += !row.hidden;
    }
    count.textContent = words.length ? `${shown} of ${body.rows.length} rows`
      : `${body.rows.length} rows`;
  };
  input?.addEventListener("input", filter);
}
for (const chart of document.querySelectorAll("svg.timeline")) {
  const readout = chart.parentElement.nextElementSibling;
  const bars = [...chart.querySelectorAll(".seg")]
    .sort((a, b) => a.x.baseVal.value - b.x.baseVal.value);
  let at = -1;
  const show = bar => {
    bars[at]?.classList.remove("on");
    at = bars.indexOf(bar);
    bar.classList.add("on");
    readout.textContent = bar.querySelector("title").textContent;
  };
  bars.forEach(bar => bar.addEventListener("pointerenter", () => show(bar)));
  chart.addEventListener("keydown", event => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step || !bars.length) return;
    event.preventDefault();
    show(bars[Math.min(bars.length - 1, Math.max(0, at + step))]);
  });
  readout.textContent = bars.length
    ? "Point at a bar, or focus the chart and use the arrow keys, to see what it is." : "";
}
