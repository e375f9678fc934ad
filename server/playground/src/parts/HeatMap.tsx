// Numbers as a table of coloured cells: rows and columns have names, a cell can be chosen.
import type { ComponentChildren } from "preact";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { colourAt, type Scale } from "../lib/scales";
import { writeCsv } from "../lib/tables";
import { isDark } from "../lib/theme";
import { Card } from "./Card";
import { Icon } from "./Icon";
import { Legend } from "./Legend";
import { save } from "./LineChart";

type Value = number | null | undefined;

export interface HeatMapProps {
  /** What is to be seen, for those who do not see it. */
  label: string;
  rows: readonly string[];
  columns: readonly string[];
  rowLabel: string;
  columnLabel: string;
  /** By row, then by column; null has no colour. */
  values: readonly (readonly Value[])[];
  scale: Scale;
  /** A cell's number, as it is read. */
  format: (value: number) => string;
  /** What cells say in place of their numbers. */
  texts?: readonly (readonly string[])[];
  /** What the card of a cell says; else its names and number. */
  describe?: (row: number, column: number) => ComponentChildren;
  chosen?: { row: number; column: number } | null;
  onChoose?: (row: number, column: number) => void;
  exportName: string;
}

/** Columns up to which cells have room for their numbers. */
const MAX_WRITTEN = 24;
/** Rows up to which they are as high as is comfortable. */
const MAX_ROOMY = 16;
/** Cells that are shown: each is an element of the page. */
const MAX_CELLS = 8_000;

/** The cell that somebody looks at. */
interface Looked {
  row: number;
  column: number;
  cell: HTMLElement;
}

export function HeatMap(props: HeatMapProps) {
  const { label, rows, rowLabel, columnLabel, values, scale, format, texts, describe, chosen, onChoose, exportName } = props;
  const columns = useMemo(
    () => props.columns.slice(0, Math.max(MAX_WRITTEN, Math.floor(MAX_CELLS / Math.max(1, rows.length)))),
    [props.columns, rows.length],
  );
  const [looked, setLooked] = useState<Looked | null>(null);
  const table = useRef<HTMLTableElement>(null);
  const dark = isDark.value;
  const isWritten = texts !== undefined || columns.length <= MAX_WRITTEN;
  const write = (value: Value): string => (value === null || value === undefined ? "–" : format(value));
  const drawing: Drawing = { ...props, columns, isDense: !isWritten, colour: (value) => colourOf(scale, value, dark) };

  useEffect(() => {
    if (looked === null) return undefined;
    const release = (event: Event): void => {
      if (!table.current?.contains(event.target as Node)) setLooked(null);
    };
    addEventListener("pointerdown", release);
    return () => removeEventListener("pointerdown", release);
  }, [looked]);

  const look = (target: EventTarget | null): void => {
    const cell = target instanceof Element ? target.closest<HTMLElement>("[data-cell]") : null;
    const [row, column] = cell?.dataset.cell?.split("-").map(Number) ?? [];
    if (cell === null || row === undefined || column === undefined) return;
    if (cell !== looked?.cell) setLooked({ row, column, cell });
  };
  const move = (event: KeyboardEvent): void => {
    if (event.key === "Escape") setLooked(null);
    const step = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
    const from = event.target instanceof HTMLElement ? event.target.dataset.cell?.split("-").map(Number) : undefined;
    if (step === undefined || from === undefined) return;
    event.preventDefault();
    const [row = 0, column = 0] = from.map((at, axis) => at + (step[axis] ?? 0));
    table.current?.querySelector<HTMLElement>(`[data-cell="${row}-${column}"]`)?.focus();
  };
  // Thousands of cells stay as they are while the card moves from one to the next.
  const body = useMemo(
    () => (
      <tbody>
        {rows.map((name, row) => (
          <tr key={row}>
            <th scope="row">{name}</th>
            {columns.map((_, column) => {
              const value = values[row]?.[column];
              const isChosen = chosen?.row === row && chosen.column === column;
              return (
                <td key={column} style={{ backgroundColor: colourOf(scale, value, dark) }}>
                  <button
                    type="button"
                    data-cell={`${row}-${column}`}
                    class={isChosen ? "is-chosen" : ""}
                    tabIndex={isChosen || (!chosen && row + column === 0) ? 0 : -1}
                    aria-pressed={onChoose ? isChosen : undefined}
                  >
                    {texts && <span>{texts[row]?.[column]}</span>}
                    <span class={isWritten && !texts ? "" : "off-screen"}>{write(value)}</span>
                  </button>
                </td>
              );
            })}
          </tr>
        ))}
      </tbody>
    ),
    [rows, columns, values, texts, scale, dark, chosen?.row, chosen?.column],
  );
  return (
    <figure class={`heat ${isWritten ? "" : "is-dense"} ${texts ? "is-worded" : ""} ${rows.length > MAX_ROOMY ? "is-tall" : ""}`}>
      <div class="table-head">
        <Legend scale={scale} />
        <span class="chart-export">
          <button type="button" class="quiet" onClick={() => save(drawSvg(drawing), `${exportName}.svg`)}>
            <Icon name="down" /> SVG
          </button>
          <button type="button" class="quiet" onClick={() => void drawPng(drawing).then((blob) => blob && save(blob, `${exportName}.png`))}>
            <Icon name="down" /> PNG
          </button>
          <button
            type="button"
            class="quiet"
            onClick={() => {
              const lines = rows.map((name, row) => [name, ...props.columns.map((_, column) => values[row]?.[column])]);
              save(new Blob([writeCsv([`${rowLabel} \\ ${columnLabel}`, ...props.columns], lines)], { type: "text/csv" }), `${exportName}.csv`);
            }}
          >
            <Icon name="down" /> CSV
          </button>
        </span>
      </div>
      <div class="heat-box" role="region" aria-label={label} tabIndex={0}>
        <table
          class="num"
          ref={table}
          onKeyDown={move}
          onPointerOver={(event) => look(event.target)}
          onPointerLeave={(event) => event.pointerType === "mouse" && setLooked(null)}
          onFocusIn={(event) => {
            const cell = event.target as HTMLElement;
            // Tab leads to the cell that was looked at last.
            table.current?.querySelectorAll<HTMLElement>('[tabindex="0"]').forEach((one) => (one.tabIndex = -1));
            cell.tabIndex = 0;
            if (cell.matches(":focus-visible")) look(cell);
          }}
          onFocusOut={() => setLooked(null)}
          onClick={(event) => {
            const cell = (event.target as Element).closest<HTMLElement>("[data-cell]");
            const [row, column] = cell?.dataset.cell?.split("-").map(Number) ?? [];
            if (row !== undefined && column !== undefined) onChoose?.(row, column);
          }}
        >
          <thead>
            <tr>
              <th scope="col">
                {rowLabel} \ {columnLabel}
              </th>
              {columns.map((name, column) => (
                <th key={column} scope="col">
                  {name}
                </th>
              ))}
            </tr>
          </thead>
          {body}
        </table>
      </div>
      {columns.length < props.columns.length && (
        <p class="hint">
          The first {columns.length} of {props.columns.length} columns are shown; the CSV has all.
        </p>
      )}
      {looked !== null && looked.row < rows.length && looked.column < columns.length && (
        <Card id={`${exportName}-card`} anchor={looked.cell} isHeld={false}>
          {describe?.(looked.row, looked.column) ?? (
            <dl class="card-rows num">
              <dt>{rowLabel}</dt>
              <dd>{rows[looked.row]}</dd>
              <dt>{columnLabel}</dt>
              <dd>{columns[looked.column]}</dd>
              <dt>{scale.label}</dt>
              <dd>{write(values[looked.row]?.[looked.column])}</dd>
            </dl>
          )}
        </Card>
      )}
    </figure>
  );
}

function colourOf(scale: Scale, value: Value, dark: boolean): string {
  return value === null || value === undefined ? "transparent" : colourAt(scale.kind, scale.place(value), dark);
}

interface Drawing extends HeatMapProps {
  /** Whether cells have no room for what they say. */
  isDense: boolean;
  colour: (value: Value) => string;
}

/** What a drawing is made with. */
interface Pen {
  rect: (x: number, y: number, width: number, height: number, fill: string) => void;
  /** Around `x`, up to it or from it on; `isUp`: from below to above. */
  text: (x: number, y: number, words: string, anchor: "start" | "middle" | "end", isUp?: boolean) => void;
}

const FONT_SIZE = 12;
const MAX_NAME = 16;

function measure({ rows, columns, texts, isDense }: Drawing) {
  const [wide, high] = isDense ? [17, 17] : [texts ? 76 : 54, 26];
  const longest = (names: readonly string[]): number => names.reduce((most, name) => Math.max(most, Math.min(MAX_NAME, name.length)), 0);
  const [left, top] = [24 + 7 * longest(rows), isDense ? 48 + 7 * longest(columns) : 64];
  return { wide, high, left, top, width: left + columns.length * wide + 12, height: top + rows.length * high + 12 };
}

/** Draw the map so that it stands alone, in the colours of the page. */
function draw(drawing: Drawing, pen: Pen): void {
  const { rows, columns, rowLabel, columnLabel, values, texts, scale, format, isDense, colour } = drawing;
  const { wide, high, left, top } = measure(drawing);
  const cut = (words: string, most: number): string => (words.length > most ? `${words.slice(0, most - 1)}…` : words);
  pen.text(12, 20, `${scale.label}: ${rowLabel} by ${columnLabel}`, "start");
  columns.forEach((name, column) => {
    const x = left + (column + 0.5) * wide;
    if (isDense) pen.text(x + 4, top - 6, cut(name, MAX_NAME), "start", true);
    else pen.text(x, top - 8, cut(name, texts ? 11 : 8), "middle");
  });
  rows.forEach((name, row) => {
    const y = top + row * high;
    pen.text(left - 8, y + high / 2 + 4, cut(name, MAX_NAME), "end");
    columns.forEach((_, column) => {
      const value = values[row]?.[column];
      if (value === null || value === undefined) return;
      pen.rect(left + column * wide, y, wide, high, colour(value));
      const words = texts?.[row]?.[column] ?? format(value);
      if (!isDense) pen.text(left + (column + 0.5) * wide, y + high / 2 + 4, cut(words, texts ? 11 : 8), "middle");
    });
  });
}

function readColour(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function drawSvg(drawing: Drawing): Blob {
  const { width, height } = measure(drawing);
  const [ink, paper] = [readColour("--ink"), readColour("--paper")];
  const safe = (words: string): string =>
    words.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll('"', "&quot;");
  const parts = [
    `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}" viewBox="0 0 ${width} ${height}" font-family="sans-serif" font-size="${FONT_SIZE}">`,
    `<rect width="100%" height="100%" fill="${paper}"/>`,
  ];
  draw(drawing, {
    rect: (x, y, wide, high, fill) => parts.push(`<rect x="${x}" y="${y}" width="${wide}" height="${high}" fill="${fill}"/>`),
    text: (x, y, words, anchor, isUp) => {
      const turned = isUp ? ` transform="rotate(-90 ${x} ${y})"` : "";
      parts.push(`<text x="${x}" y="${y}" text-anchor="${anchor}" fill="${ink}"${turned}>${safe(words)}</text>`);
    },
  });
  return new Blob([...parts, "</svg>"], { type: "image/svg+xml" });
}

/** Pixels that a browser's canvas is wide at most. */
const MAX_CANVAS = 16_000;

function drawPng(drawing: Drawing): Promise<Blob | null> {
  const { width, height } = measure(drawing);
  const canvas = document.createElement("canvas");
  const factor = Math.min(2, MAX_CANVAS / Math.max(width, height));
  [canvas.width, canvas.height] = [width * factor, height * factor];
  const context = canvas.getContext("2d");
  if (context === null) return Promise.resolve(null);
  const [ink, paper] = [readColour("--ink"), readColour("--paper")];
  const rect: Pen["rect"] = (x, y, wide, high, fill) => {
    context.fillStyle = fill;
    context.fillRect(x, y, wide, high);
  };
  context.scale(factor, factor);
  context.font = `${FONT_SIZE}px sans-serif`;
  rect(0, 0, width, height, paper);
  draw(drawing, {
    rect,
    text: (x, y, words, anchor, isUp) => {
      context.save();
      context.translate(x, y);
      if (isUp) context.rotate(-Math.PI / 2);
      context.textAlign = anchor === "middle" ? "center" : anchor;
      context.fillStyle = ink;
      context.fillText(words, 0, 0);
      context.restore();
    },
  });
  return new Promise((done) => canvas.toBlob(done, "image/png"));
}
