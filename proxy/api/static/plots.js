// Plots by uPlot, in the colours of the page and as wide as their box; and the curves of replayed runs.
// It imports nothing: `benchmarks/replay_report.py` puts it into a report as it is.

export const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const scheme = matchMedia("(prefers-color-scheme: dark)");

// Draws what `options` and `data` return, again when the colours change. Gives back how to update it and how to end it.
export const plotIn = (box, height, options, data) => {
  let plot;
  const draw = () => {
    plot?.destroy();
    plot = new uPlot({ ...options(), width: box.clientWidth, height }, data(), box);
  };
  draw();
  const size = new ResizeObserver(() => plot.setSize({ width: box.clientWidth, height }));
  size.observe(box);
  scheme.addEventListener("change", draw);
  return {
    update: () => plot.setData(data()),
    end() {
      size.disconnect();
      scheme.removeEventListener("change", draw);
      plot.destroy();
    },
  };
};

export const axis = () => ({ stroke: color("--quiet"), grid: { stroke: color("--line"), width: 1 }, ticks: { show: false } });

const TONES = ["t4", "t6", "t3", "t5", "t8", "t2", "t7", "t1"];
const SMALL = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
const LARGE = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
const figure = (value) => (value < 10_000 ? SMALL : LARGE).format(value);
const shown = (_, value) => (value === null || value === undefined ? "–" : figure(value));
const marks = (_, values) => values.map((value) => (value === null ? null : figure(value)));

// A plot of each of `curves` in `box`; a policy has the same colour in all. Gives back how to end them.
export const drawCurves = (box, curves) => {
  const policies = [...new Set(curves.flatMap(({ lines }) => lines.map(({ policy }) => policy)))];
  const line = ({ policy }) => {
    const at = policies.indexOf(policy);
    return {
      label: policy,
      stroke: color(`--${TONES[at % TONES.length]}`),
      dash: at < TONES.length ? undefined : [6, 4],
      width: policy === "kvpin" ? 3 : 1.5,
      points: { show: true, size: 6 },
      spanGaps: true,
      value: shown,
    };
  };
  const markers = {
    fill: (plot, at) => (plot.series[at].dash ? undefined : plot.series[at].stroke(plot, at)),
    dash: (plot, at) => (plot.series[at].dash ? "dashed" : "solid"),
  };
  const plots = curves.map(({ title, axis: label, x, lines, is_log: isLog }) => {
    const [card, caption, place] = ["figure", "figcaption", "div"].map((name) => document.createElement(name));
    card.className = "card chart";
    caption.textContent = title;
    card.append(caption, place);
    box.append(card);
    const options = () => ({
      scales: { x: { time: false, distr: 3, log: 2 }, y: isLog ? { distr: 3 } : {} },
      axes: [
        { ...axis(), size: 28, label, labelSize: 20, labelFont: "13px system-ui, sans-serif", splits: () => x, values: marks },
        { ...axis(), size: 52, values: marks },
      ],
      legend: { markers },
      series: [{ label, value: shown }, ...lines.map(line)],
    });
    return plotIn(place, 240, options, () => [x, ...lines.map(({ y }) => y)]);
  });
  return () => plots.forEach((plot) => plot.end());
};
