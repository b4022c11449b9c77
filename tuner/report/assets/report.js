"use strict";
(() => {
  const PRINT_COLUMN = 332; // px: half of an A4 page between the margins, less the gap
  const PRINT_PAGE = 690;
  const figures = JSON.parse(document.getElementById("figure-data").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");

  const palette = () => {
    const style = getComputedStyle(document.documentElement);
    const of = (name) => style.getPropertyValue(name).trim();
    return {
      "@accent": of("--accent"), "@ink": of("--ink"), "@muted": of("--muted"), "@soft": of("--soft"),
      "@line": of("--line"), "@bad": of("--bad"), surface: of("--surface"), hair: of("--hair"),
      ink2: of("--ink-2"), sans: of("--sans"),
    };
  };

  const coloured = (value, colours) => {
    if (typeof value === "string") return colours[value] && value[0] === "@" ? colours[value] : value;
    if (Array.isArray(value)) return value.map((item) => coloured(item, colours));
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, coloured(item, colours)]));
    }
    return value;
  };

  const layoutOf = (figure, colours, size, printing) => {
    const axis = (own) => ({
      gridcolor: colours.hair, zerolinecolor: colours["@line"], linecolor: colours["@line"], showline: true,
      ticks: "outside", tickcolor: colours["@line"], ticklen: 4, automargin: true, ...coloured(own || {}, colours),
      title: { font: { size: printing ? 9.5 : 12, color: colours.ink2 }, standoff: 8, ...(own && own.title) },
    });
    return {
      ...coloured(figure.layout, colours),
      ...size,
      xaxis: axis(figure.layout.xaxis),
      yaxis: axis(figure.layout.yaxis),
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      showlegend: figure.layout.showlegend ?? true,
      font: { family: colours.sans, size: printing ? 9.5 : 12, color: colours.ink2 },
      margin: { l: 52, r: 14, t: 34, b: 44 },
      legend: { orientation: "h", x: 0, xanchor: "left", y: 1.02, yanchor: "bottom", font: { size: printing ? 9 : 11.5 }, bgcolor: "rgba(0,0,0,0)" },
      hoverlabel: { bgcolor: colours.surface, bordercolor: colours["@line"], align: "left",
        font: { family: colours.sans, size: 12, color: colours["@ink"] } },
      hovermode: "closest",
    };
  };

  const config = { responsive: true, displayModeBar: false };

  const drawAll = (printing) => {
    if (!window.Plotly) return;
    const colours = palette();
    for (const figure of figures) {
      const target = document.querySelector(`[data-figure="${figure.key}"]`);
      const wide = target.closest("figure").classList.contains("wide");
      const size = printing ? { width: wide ? PRINT_PAGE : PRINT_COLUMN, autosize: false } : { autosize: true };
      const height = printing ? Math.min(figure.layout.height, wide ? 900 : 250) : figure.layout.height;
      target.style.minHeight = `${height}px`;
      window.Plotly.react(target, coloured(figure.data, colours), { ...layoutOf(figure, colours, size, printing), height }, config);
    }
  };

  const copy = async (text) => {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      const area = document.createElement("textarea");
      area.value = text;
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
  };
  for (const button of document.querySelectorAll("button[data-copies]")) {
    button.addEventListener("click", async () => {
      const label = button.textContent;
      await copy(document.getElementById(button.dataset.copies).textContent);
      button.textContent = "Copied";
      window.setTimeout(() => { button.textContent = label; }, 1500);
    });
  }

  drawAll(false);
  dark.addEventListener("change", () => drawAll(false));
  window.matchMedia("print").addEventListener("change", (event) => drawAll(event.matches));
  window.addEventListener("beforeprint", () => drawAll(true));
  window.addEventListener("afterprint", () => drawAll(false));
  document.documentElement.dataset.drawn = String(figures.length);
})();
