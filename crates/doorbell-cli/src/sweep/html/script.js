// Shows what a marker's title says at once and beside the nearest marker; without this, the browser does after a moment.
(() => {
  const tip = document.createElement("div");
  tip.id = "tip";
  document.body.append(tip);
  let on = null;
  const leave = () => {
    if (on) on.classList.remove("on");
    on = null;
    tip.style.opacity = 0;
  };
  for (const chart of document.querySelectorAll("svg.chart")) {
    const marks = [...chart.querySelectorAll("g.m")];
    for (const mark of marks) {
      const title = mark.querySelector("title");
      mark.dataset.tip = title.textContent;
      title.remove();
    }
    chart.addEventListener("pointermove", (event) => {
      let best = null, least = 40 * 40, at = null;
      for (const mark of marks) {
        const box = mark.getBoundingClientRect();
        const x = box.left + box.width / 2, y = box.top + box.height / 2;
        const far = (x - event.clientX) ** 2 + (y - event.clientY) ** 2;
        if (far < least) { best = mark; least = far; at = [x, y]; }
      }
      if (best === on) return;
      leave();
      if (!best) return;
      on = best;
      on.classList.add("on");
      tip.textContent = best.dataset.tip;
      const left = Math.min(Math.max(8, at[0] - tip.offsetWidth / 2), innerWidth - tip.offsetWidth - 8);
      const above = at[1] - tip.offsetHeight - 12;
      tip.style.left = left + "px";
      tip.style.top = (above > 4 ? above : at[1] + 14) + "px";
      tip.style.opacity = 1;
    });
    chart.addEventListener("pointerleave", leave);
  }
  addEventListener("scroll", leave, { passive: true });
})();
