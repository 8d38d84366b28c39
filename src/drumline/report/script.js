// What the page does beyond showing: the theme, the values under the cursor, and a live run. It works without.
"use strict";
(() => {
  const root = document.documentElement, button = document.getElementById("theme");
  const order = ["auto", "light", "dark"];
  let theme = "auto";
  try { theme = localStorage.getItem("drumline-theme") || "auto"; } catch { /* not stored for pages on disk */ }
  const apply = () => {
    if (theme === "auto") delete root.dataset.theme;
    else root.dataset.theme = theme;
    button.textContent = "Theme: " + theme;
  };
  button.hidden = false;
  button.addEventListener("click", () => {
    theme = order[(order.indexOf(theme) + 1) % 3];
    try { localStorage.setItem("drumline-theme", theme); } catch { /* as above */ }
    apply();
  });
  apply();

  // The values of a chart are those of its table.
  const values = (figure) => {
    const table = figure.querySelector("table");
    const heads = [...table.tHead.rows[0].cells].map((cell) => cell.textContent);
    const rows = [...table.tBodies[0].rows].map((row) => [...row.cells].map((cell) => cell.textContent));
    return { heads, rows };
  };
  const show = (figure, index) => {
    const svg = figure.querySelector("svg.plot"), { heads, rows } = values(figure);
    const row = rows[Math.max(0, Math.min(rows.length - 1, index))];
    const [x0, x1] = [Number(svg.dataset.x0), Number(svg.dataset.x1)];
    const at = 54 + ((Number(row[0]) - x0) / (x1 - x0)) * (440 - 54 - 14);
    let line = svg.querySelector(".cursor");
    if (!line) {
      line = document.createElementNS("http://www.w3.org/2000/svg", "line");
      line.setAttribute("class", "cursor");
      line.setAttribute("y1", 22);
      line.setAttribute("y2", 210);
      svg.append(line);
    }
    line.setAttribute("x1", at);
    line.setAttribute("x2", at);
    let tip = figure.querySelector(".tip");
    if (!tip) {
      tip = document.createElement("div");
      tip.className = "tip";
      tip.setAttribute("role", "status");
      figure.append(tip);
    }
    tip.textContent = heads.map((head, n) => (row[n] ? head + " " + row[n] : "")).filter(Boolean).join("\n");
    const box = svg.getBoundingClientRect(), own = figure.getBoundingClientRect();
    const left = box.left - own.left + (at / 440) * box.width;
    tip.style.top = box.top - own.top + 8 + "px";
    tip.style.left = Math.max(4, left + (at > 220 ? -tip.offsetWidth - 8 : 8)) + "px";
    figure.dataset.index = rows.indexOf(row);
  };
  const hide = (figure) => figure.querySelectorAll(".cursor, .tip").forEach((each) => each.remove());
  const wire = (scope) => {
    for (const svg of scope.querySelectorAll("svg.plot")) {
      const figure = svg.closest("figure");
      svg.tabIndex = 0;
      svg.addEventListener("pointermove", (event) => {
        const box = svg.getBoundingClientRect(), { rows } = values(figure);
        const [x0, x1] = [Number(svg.dataset.x0), Number(svg.dataset.x1)];
        const x = x0 + ((((event.clientX - box.left) / box.width) * 440 - 54) / 372) * (x1 - x0);
        let near = 0;
        rows.forEach((row, n) => { if (Math.abs(row[0] - x) < Math.abs(rows[near][0] - x)) near = n; });
        show(figure, near);
      });
      svg.addEventListener("pointerleave", () => hide(figure));
      svg.addEventListener("blur", () => hide(figure));
      svg.addEventListener("keydown", (event) => {
        const moves = { ArrowLeft: -1, ArrowRight: 1, Home: -1e9, End: 1e9 };
        if (event.key === "Escape") hide(figure);
        if (!(event.key in moves)) return;
        event.preventDefault();
        show(figure, Number(figure.dataset.index ?? -1) + moves[event.key]);
      });
    }
  };
  const live = document.body.dataset.live !== undefined;
  if (live) for (const part of document.getElementById("content").children) part.dataset.source = part.outerHTML;
  wire(document);

  // A live page fetches itself and replaces the parts that have changed; what is open stays open.
  if (!live) return;
  const sign = document.querySelector(".live");
  let tag = "";
  const refresh = async () => {
    try {
      const answer = await fetch(location.href, { cache: "no-store", signal: AbortSignal.timeout(20000), headers: tag ? { "If-None-Match": tag } : {} });
      if (answer.status === 200) {
        tag = answer.headers.get("ETag") || "";
        const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
        const old = document.getElementById("content"), now = fresh.getElementById("content");
        const same = [...old.children].map((each) => each.id).join() === [...now.children].map((each) => each.id).join();
        for (const part of same ? [...now.children] : [now]) {
          const there = document.getElementById(part.id);
          if (there.dataset.source === part.outerHTML) continue;
          const source = part.outerHTML;
          const open = [...there.querySelectorAll("details")].map((each) => each.open);
          part.querySelectorAll("details").forEach((each, n) => { each.open = open[n] ?? each.open; });
          const focus = [...there.querySelectorAll("*")].indexOf(document.activeElement);
          there.replaceWith(part);
          wire(part);
          if (focus >= 0) part.querySelectorAll("*")[focus]?.focus({ preventScroll: true });
          part.dataset.source = source;
        }
        document.querySelector("footer").replaceWith(fresh.querySelector("footer"));
        document.querySelector("nav").replaceWith(fresh.querySelector("nav"));
      }
      sign.textContent = "● live";
      sign.classList.remove("lost");
    } catch {
      sign.textContent = "○ the server has stopped";
      sign.classList.add("lost");
    }
    setTimeout(refresh, 2000);
  };
  setTimeout(refresh, 2000);
})();
