"use strict";
// Sorting by a heading; bytes at the reader's context; the name of the dot that is nearest to the pointer.
(() => {
  const all = (query, root = document) => [...root.querySelectorAll(query)];

  // -- sorting: headings hold buttons, so Tab and Enter work; cells without a number go last
  for (const table of all("table.sort")) {
    const heads = all("thead th", table), body = table.querySelector("tbody.rows");
    heads.forEach((head, i) => head.querySelector("button").addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const rows = [...body.rows].map((row) => [row.cells[i].dataset.v, row]);
      rows.sort(([a], [b]) => {
        if (a === "" || b === "") return (a === "") - (b === "");
        const by = i === 0 ? a.localeCompare(b, "en", { numeric: true }) : a - b;
        return up ? by : -by;
      });
      body.append(...rows.map(([, row]) => row));
    }));
  }

  // -- the dot nearest to the pointer is named under its drawing
  for (const figure of all("figure.plot")) {
    const svg = figure.querySelector("svg"), told = figure.querySelector(".near");
    const show = (event) => {
      let best = null, least = 40;
      for (const dot of all(".dot", svg)) {
        const box = dot.querySelector(".mark").getBoundingClientRect();
        const away = Math.hypot(box.x + box.width / 2 - event.clientX, box.y + box.height / 2 - event.clientY);
        if (away < least) [best, least] = [dot, away];
      }
      all(".dot.on", svg).forEach((dot) => dot.classList.remove("on"));
      if (best) best.classList.add("on");
      told.textContent = best ? best.querySelector("title").textContent : told.dataset.hint;
    };
    svg.addEventListener("pointermove", show);
    svg.addEventListener("click", show);
  }

  // -- bytes at the context that the reader asks for
  const data = document.getElementById("sizes");
  const box = document.getElementById("context");
  if (!data || !box) return;
  const { contexts, bytes, frame } = JSON.parse(data.textContent);
  const held = (spec, n) => {
    const values = bytes[spec];
    let i = 0;
    while (i < contexts.length - 2 && contexts[i + 1] < n) i++;
    const share = (n - contexts[i]) / (contexts[i + 1] - contexts[i]);
    return Math.max(0, values[i] + share * (values[i + 1] - values[i]));
  };
  const text = (n) => {
    const units = ["B", "kB", "MB", "GB"];
    let i = 0;
    while (n >= 1000 && i < 3) { n /= 1000; i++; }
    return `${i ? n.toFixed(1) : n.toFixed(0)} ${units[i]}`;
  };
  const tick = (n) => text(n).replace(".0 ", " ");
  const svgText = (parent, x, y, anchor, content) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", "text");
    made.setAttribute("x", x);
    made.setAttribute("y", y);
    made.setAttribute("text-anchor", anchor);
    made.textContent = content;
    parent.append(made);
  };

  const move = (svg, n) => {
    const better = svg.dataset.better === "lower" ? 1 : -1;
    const dots = all(".dot", svg).map((node) => ({
      node, spec: node.dataset.spec, value: better * Number(node.dataset.y), size: held(node.dataset.spec, n),
      y: Number(node.getAttribute("transform").match(/ ([-\d.]+)\)/)[1]),
    }));
    const most = 1.06 * Math.max(...dots.map((dot) => dot.size));
    const at = (size) => frame.left + (frame.width - frame.left - frame.right) * size / most;
    for (const dot of dots) {
      dot.x = at(dot.size);
      dot.node.setAttribute("transform", `translate(${dot.x.toFixed(1)} ${dot.y})`);
      const title = dot.node.querySelector("title");
      title.textContent = title.textContent.replace(/ at [^:]*$/, ` at ${text(dot.size)}`);
    }
    const axis = svg.querySelector(".xaxis");
    axis.replaceChildren();
    const unit = 10 ** Math.floor(Math.log10(most / 5));
    const step = unit * [1, 2, 5, 10].find((m) => unit * m >= most / 5);
    for (let x = 0; x <= most; x += step) svgText(axis, at(x).toFixed(1), frame.height - frame.bottom + 15, "middle", tick(x));
    // the frontier, and its names on the side where nothing is
    dots.sort((a, b) => a.size - b.size || a.value - b.value);
    const front = [];
    for (const dot of dots) if (!front.length || dot.value < front[front.length - 1].value) front.push(dot);
    svg.querySelector(".front").setAttribute("d", "M" + front.map((d) => `${d.x.toFixed(1)} ${d.y}`).join("L"));
    const names = svg.querySelector(".names");
    names.replaceChildren();
    let last = better > 0 ? -99 : 9999;
    for (const dot of front) {
      const fits = dot.x - 8 - frame.letter * dot.spec.length >= frame.left;
      let y = better > 0 ? dot.y + (fits ? 4 : 15) : dot.y - (fits ? -4 : 9);
      y = better > 0 ? Math.max(y, last + 12) : Math.min(y, last - 12);
      last = Math.min(Math.max(y, frame.top - 3), frame.height - frame.bottom - 3);
      svgText(names, fits ? dot.x - 8 : frame.left + 3, last, fits ? "end" : "start", dot.spec);
    }
    const label = svg.getAttribute("aria-label");
    svg.setAttribute("aria-label", label.replace(/cheaper one: .*?\. All/, () =>
      `cheaper one: ${front.map((d) => `${d.spec} at ${text(d.size)}`).join("; ")}. All`));
  };

  const ask = () => {
    const n = Number(box.value);
    if (!Number.isFinite(n) || n < contexts[0] || n > contexts[contexts.length - 1]) {
      box.setAttribute("aria-invalid", "true");
      return;
    }
    box.removeAttribute("aria-invalid");
    all("#bytes svg[data-name]").forEach((svg) => move(svg, n));
    all("th[data-key=bytes]").forEach((head) => {
      for (const row of all("tr[data-spec]", head.closest("table"))) {
        if (!(row.dataset.spec in bytes)) continue;
        const cell = row.cells[head.cellIndex], size = held(row.dataset.spec, n);
        cell.dataset.v = size;
        cell.textContent = text(size);
      }
    });
    all(".denseat").forEach((node) => { node.textContent = text(held("(uncompressed)", n)); });
    all(".atcontext").forEach((node) => { node.textContent = n.toLocaleString("en"); });
  };
  box.addEventListener("input", ask);
  document.getElementById("asked").hidden = false;
})();
