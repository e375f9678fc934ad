// Lines over numbers, drawn by uPlot; with its numbers as a table, and a picture, to take away.
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import { number, tick } from "../lib/format";
import { seriesColour } from "../lib/scales";
import { isDark } from "../lib/theme";
import { writeCsv } from "../lib/tables";
import { Icon } from "./Icon";

export interface Series {
  label: string;
  values: readonly (number | null)[];
  /** Of the series' colours; its place in the list unless given. */
  colour?: number;
  dash?: number[];
  /** Draw each point; else only where the pointer is. */
  points?: boolean;
  width?: number;
  /** A step from point to point, in place of a straight line. */
  stepped?: boolean;
}

export interface LineChartProps {
  /** What is to be seen, in a sentence, for those who do not see it. */
  label: string;
  x: readonly number[];
  series: readonly Series[];
  xLabel: string;
  yLabel: string;
  height?: number;
  logY?: boolean;
  xFormat?: (value: number) => string;
  yFormat?: (value: number) => string;
  /** Called with the index of the point under the pointer, and with null once there is none. */
  onHover?: (index: number | null) => void;
  /** Where a click or Enter was: for what a chosen point explains. */
  onChoose?: (index: number) => void;
  /** Leave the numbers under the pointer out of the legend, where they are told elsewhere. */
  plainLegend?: boolean;
  /** Range of the axes, where the numbers' own is not wanted. */
  xRange?: [number, number];
  yRange?: [number, number];
  /** Dashed lines at these heights, such as 0. */
  rules?: number[];
  /** Name of the files that PNG and CSV are saved as; no buttons without it. */
  exportName?: string;
  /** Columns of the CSV, where more is known than is drawn. */
  csv?: () => string;
}

export function LineChart(props: LineChartProps) {
  const { label, x, series, height = 260, exportName } = props;
  const box = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const latest = useRef(props);
  latest.current = props;
  const [index, setIndex] = useState<number | null>(null);
  const dark = isDark.value;
  const data = useMemo(
    () => [[...x], ...series.map((line) => [...line.values])] as uPlot.AlignedData,
    [x, series],
  );
  const shape = JSON.stringify([
    series.map(({ values: _, ...line }) => line),
    [props.xLabel, props.yLabel, props.logY, props.xRange, props.yRange, props.rules, height],
  ]);

  useLayoutEffect(() => {
    const element = box.current;
    if (element === null) return undefined;
    const width = Math.max(element.clientWidth, 200);
    const chart = new uPlot(makeOptions(latest.current, width, dark, setIndex), data, element);
    plot.current = chart;
    const observer = new ResizeObserver(() => {
      const next = element.clientWidth;
      if (next > 0 && next !== chart.width) chart.setSize({ width: next, height });
    });
    observer.observe(element);
    return () => {
      observer.disconnect();
      chart.destroy();
      plot.current = null;
    };
  }, [shape, dark]);

  useEffect(() => {
    if (plot.current !== null && plot.current.data !== data) plot.current.setData(data);
  }, [data]);

  useEffect(() => latest.current.onHover?.(index), [index]);

  const move = (event: KeyboardEvent): void => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Enter" && index !== null) props.onChoose?.(index);
    if (step === undefined) return;
    event.preventDefault();
    const next = Math.min(x.length - 1, Math.max(0, index === null ? 0 : index + step));
    const at = plot.current?.valToPos(x[next] as number, "x");
    if (at !== undefined) plot.current?.setCursor({ left: at, top: 0 });
    setIndex(next);
  };

  const xFormat = props.xFormat ?? number;
  const yFormat = props.yFormat ?? number;
  return (
    <figure class="chart">
      <div class="chart-head">
        <ul class="chart-legend">
          {series.map((line, at) => (
            <li key={at}>
              <svg viewBox="0 0 20 8" aria-hidden="true">
                <line
                  x1="0"
                  x2="20"
                  y1="4"
                  y2="4"
                  stroke={seriesColour(line.colour ?? at, dark)}
                  stroke-width="2.5"
                  stroke-dasharray={line.dash?.map((part) => part / 2).join(" ")}
                />
              </svg>
              {line.label}
              {!props.plainLegend && (
                <b class={index === null ? "num is-unseen" : "num"}>
                  {yFormat((line.values[index ?? 0] ?? Number.NaN) as number)}
                </b>
              )}
            </li>
          ))}
          {!props.plainLegend && x.length > 0 && (
            <li class={`chart-at num ${index === null ? "is-unseen" : ""}`}>
              {props.xLabel} {xFormat(x[index ?? 0] as number)}
            </li>
          )}
        </ul>
        {exportName && (
          <div class="chart-export">
            <button type="button" class="quiet" onClick={() => void savePng(plot.current, props)}>
              <Icon name="down" /> PNG
            </button>
            <button
              type="button"
              class="quiet"
              onClick={() => save(new Blob([props.csv?.() ?? toCsv(props)], { type: "text/csv" }), `${exportName}.csv`)}
            >
              <Icon name="down" /> CSV
            </button>
          </div>
        )}
      </div>
      <div
        ref={box}
        class="chart-box"
        role="img"
        tabIndex={0}
        aria-label={label}
        onKeyDown={move}
        onClick={() => {
          if (index !== null) props.onChoose?.(index);
        }}
      />
    </figure>
  );
}

interface Inks {
  ink: string;
  muted: string;
  line: string;
  paper: string;
}

function readInks(): Inks {
  const style = getComputedStyle(document.documentElement);
  const read = (name: string): string => style.getPropertyValue(name).trim();
  return { ink: read("--ink"), muted: read("--muted"), line: read("--line"), paper: read("--paper") };
}

function makeOptions(
  props: LineChartProps,
  width: number,
  dark: boolean,
  onIndex: (index: number | null) => void,
): uPlot.Options {
  const { series, height = 260, xFormat = tick, yFormat = tick } = props;
  const inks = readInks();
  const font = `12px ${getComputedStyle(document.body).fontFamily}`;
  const axis = (label: string, format: (value: number) => string): uPlot.Axis => ({
    label,
    font,
    labelFont: font,
    labelSize: 20,
    labelGap: 0,
    gap: 6,
    stroke: inks.muted,
    grid: { stroke: inks.line, width: 1 },
    ticks: { show: false },
    values: (_, splits) => splits.map((value) => (value === null ? "" : format(value))),
  });
  // Of a step, the point is the one that the step begins with.
  const isStepped = series.some((line) => line.stepped);
  const find = (chart: uPlot, closest: number, value: number): number =>
    isStepped && closest > 0 && (chart.data[0][closest] ?? 0) > value ? closest - 1 : closest;
  const range = (given: [number, number] | undefined): uPlot.Scale["range"] => given && (() => given);
  return {
    width,
    height,
    legend: { show: false },
    cursor: {
      y: false,
      dataIdx: (chart, _series, closest, value) => find(chart, closest, value),
      points: {
        size: 8,
        fill: (_, index) => seriesColour(series[index - 1]?.colour ?? index - 1, dark),
      },
      drag: { x: false, y: false, setScale: false },
    },
    scales: {
      x: { time: false, range: range(props.xRange) },
      y: { distr: props.logY ? 3 : 1, range: range(props.yRange) },
    },
    axes: [
      { ...axis(props.xLabel, xFormat), size: 30 },
      {
        ...axis(props.yLabel, yFormat),
        size: 52,
        filter: (_, splits) => splits,
        splits: props.logY ? (_chart, _axis, low, high) => listDecades(low, high) : undefined,
      },
    ],
    series: [
      {},
      ...series.map((line, index): uPlot.Series => {
        const colour = seriesColour(line.colour ?? index, dark);
        return {
          label: line.label,
          stroke: colour,
          width: line.width ?? 2,
          dash: line.dash,
          paths: line.stepped ? uPlot.paths.stepped?.({ align: 1 }) : undefined,
          points: { show: line.points ?? false, size: 6, fill: inks.paper, stroke: colour },
          spanGaps: false,
        };
      }),
    ],
    hooks: {
      setCursor: [
        (chart) => {
          const { idx, left = -1 } = chart.cursor;
          const isKnown = idx !== null && idx !== undefined && left >= 0;
          onIndex(isKnown ? find(chart, idx, chart.posToVal(left, "x")) : null);
        },
      ],
      drawClear: [
        (chart) => {
          for (const rule of props.rules ?? []) {
            const at = Math.round(chart.valToPos(rule, "y", true));
            const { left, width: span, top, height: tall } = chart.bbox;
            if (at < top || at > top + tall) continue;
            chart.ctx.save();
            chart.ctx.strokeStyle = inks.muted;
            chart.ctx.setLineDash([4 * devicePixelRatio, 4 * devicePixelRatio]);
            chart.ctx.beginPath();
            chart.ctx.moveTo(left, at);
            chart.ctx.lineTo(left + span, at);
            chart.ctx.stroke();
            chart.ctx.restore();
          }
        },
      ],
    },
  };
}

/** Powers of ten from `low` to `high`, at most eight of them; with their double and fivefold if few. */
function listDecades(low: number, high: number): number[] {
  const [first, last] = [Math.floor(Math.log10(low)), Math.floor(Math.log10(high))];
  const decades = Array.from({ length: last - first + 1 }, (_, n) => 10 ** (first + n));
  const isInside = (value: number): boolean => value >= low && value <= high;
  const inside = decades.filter(isInside);
  if (inside.length < 3) {
    return decades.flatMap((value) => [value, 2 * value, 5 * value]).filter(isInside);
  }
  const step = Math.ceil(inside.length / 8);
  return inside.filter((_, n) => n % step === 0);
}

function toCsv({ x, series, xLabel }: LineChartProps): string {
  const head = [xLabel, ...series.map((line) => line.label)];
  return writeCsv(head, x.map((value, at) => [value, ...series.map((line) => line.values[at])]));
}

async function savePng(plot: uPlot | null, props: LineChartProps): Promise<void> {
  if (plot === null) return;
  const drawn = plot.ctx.canvas;
  const scale = devicePixelRatio;
  const canvas = document.createElement("canvas");
  const head = 28 * scale;
  canvas.width = drawn.width;
  canvas.height = drawn.height + head;
  const context = canvas.getContext("2d");
  if (context === null) return;
  const inks = readInks();
  context.fillStyle = inks.paper;
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(drawn, 0, head);
  context.font = `${13 * scale}px ${getComputedStyle(document.body).fontFamily}`;
  let left = 12 * scale;
  props.series.forEach((line, at) => {
    context.strokeStyle = seriesColour(line.colour ?? at, isDark.value);
    context.lineWidth = 2.5 * scale;
    context.setLineDash((line.dash ?? []).map((part) => part * scale));
    context.beginPath();
    context.moveTo(left, 15 * scale);
    context.lineTo(left + 18 * scale, 15 * scale);
    context.stroke();
    context.fillStyle = inks.ink;
    context.fillText(line.label, left + 24 * scale, 19 * scale);
    left += 24 * scale + context.measureText(line.label).width + 18 * scale;
  });
  const blob = await new Promise<Blob | null>((done) => canvas.toBlob(done, "image/png"));
  if (blob !== null) save(blob, `${props.exportName ?? "chart"}.png`);
}

/** Offer a file that was made here. */
export function save(blob: Blob, name: string): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
