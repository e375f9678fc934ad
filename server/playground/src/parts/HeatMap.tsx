// Numbers as a table of coloured cells: rows and columns have names, a cell can be chosen.
import { useRef, useState } from "preact/hooks";
import { colourAt, type Scale } from "../lib/scales";
import { writeCsv } from "../lib/tables";
import { isDark } from "../lib/theme";
import { Icon } from "./Icon";
import { Legend } from "./Legend";
import { save } from "./LineChart";

interface HeatMapProps {
  /** What is to be seen, for those who do not see it. */
  label: string;
  rows: readonly string[];
  columns: readonly string[];
  rowLabel: string;
  columnLabel: string;
  /** By row, then by column; null has no colour. */
  values: readonly (readonly (number | null | undefined)[])[];
  scale: Scale;
  /** A cell's number, as it is read. */
  format: (value: number) => string;
  chosen?: { row: number; column: number } | null;
  onChoose?: (row: number, column: number) => void;
  exportName: string;
}

/** Columns up to which cells have room for their numbers. */
const MAX_WRITTEN = 24;

export function HeatMap(props: HeatMapProps) {
  const { label, rows, columns, rowLabel, columnLabel, values, scale, format, chosen, onChoose, exportName } = props;
  const [focus, setFocus] = useState({ row: chosen?.row ?? 0, column: chosen?.column ?? 0 });
  const [looked, setLooked] = useState<{ row: number; column: number } | null>(null);
  const table = useRef<HTMLTableElement>(null);
  const dark = isDark.value;
  const isWritten = columns.length <= MAX_WRITTEN;
  const colour = (value: number | null | undefined): string =>
    value === null || value === undefined ? "transparent" : colourAt(scale.kind, scale.place(value), dark);
  const move = (event: KeyboardEvent): void => {
    const step = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    const row = Math.min(rows.length - 1, Math.max(0, focus.row + (step[0] ?? 0)));
    const column = Math.min(columns.length - 1, Math.max(0, focus.column + (step[1] ?? 0)));
    setFocus({ row, column });
    table.current?.querySelector<HTMLElement>(`[data-cell="${row}-${column}"]`)?.focus();
  };
  const row = Math.min(looked?.row ?? focus.row, rows.length - 1);
  const column = Math.min(looked?.column ?? focus.column, columns.length - 1);
  const looking = values[row]?.[column];
  const at = {
    row: Math.min(focus.row, rows.length - 1),
    column: Math.min(focus.column, columns.length - 1),
    // Where cells have no room for their numbers, the one under the pointer is told here.
    shown: isWritten ? "" : `${rowLabel} ${rows[row]}, ${columnLabel} ${columns[column]}: ${looking == null ? "–" : format(looking)}`,
  };
  return (
    <figure class={`heat ${isWritten ? "" : "is-dense"}`}>
      <div class="table-head">
        <Legend scale={scale} />
        {at.shown && <span class="hint num heat-at">{at.shown}</span>}
        <span class="chart-export">
          <button type="button" class="quiet" onClick={() => save(drawSvg(props, colour), `${exportName}.svg`)}>
            <Icon name="down" /> SVG
          </button>
          <button
            type="button"
            class="quiet"
            onClick={() => {
              const lines = rows.map((name, row) => [name, ...columns.map((_, column) => values[row]?.[column])]);
              save(new Blob([writeCsv([`${rowLabel} \\ ${columnLabel}`, ...columns], lines)], { type: "text/csv" }), `${exportName}.csv`);
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
          onPointerOver={(event) => {
            const cell = event.target instanceof Element ? event.target.closest<HTMLElement>("[data-cell]") : null;
            const [over, beside] = cell?.dataset.cell?.split("-").map(Number) ?? [];
            if (over !== undefined && beside !== undefined) setLooked({ row: over, column: beside });
          }}
          onPointerLeave={() => setLooked(null)}
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
          <tbody>
            {rows.map((name, row) => (
              <tr key={row}>
                <th scope="row">{name}</th>
                {columns.map((columnName, column) => {
                  const value = values[row]?.[column];
                  const text = value === null || value === undefined ? "–" : format(value);
                  const isChosen = chosen?.row === row && chosen.column === column;
                  return (
                    <td key={column} style={{ backgroundColor: colour(value) }}>
                      <button
                        type="button"
                        data-cell={`${row}-${column}`}
                        class={isChosen ? "is-chosen" : ""}
                        tabIndex={row === at.row && column === at.column ? 0 : -1}
                        aria-pressed={onChoose ? isChosen : undefined}
                        title={`${rowLabel} ${name}, ${columnLabel} ${columnName}: ${text}`}
                        onFocus={() => setFocus({ row, column })}
                        onClick={() => onChoose?.(row, column)}
                      >
                        <span class={isWritten ? "" : "off-screen"}>{text}</span>
                      </button>
                    </td>
                  );
                })}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </figure>
  );
}

/** The map as a drawing that stands alone, in the colours of the page. */
function drawSvg(props: HeatMapProps, colour: (value: number | null | undefined) => string): Blob {
  const { rows, columns, values, scale, rowLabel, columnLabel, format } = props;
  const ink = getComputedStyle(document.documentElement).getPropertyValue("--ink").trim();
  const paper = getComputedStyle(document.documentElement).getPropertyValue("--paper").trim();
  const [wide, high, left, top] = [54, 26, 110, 64];
  const safe = (text: string): string =>
    text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll('"', "&quot;");
  const text = (x: number, y: number, words: string, anchor = "middle"): string =>
    `<text x="${x}" y="${y}" text-anchor="${anchor}" fill="${ink}">${safe(words)}</text>`;
  const cells = rows.flatMap((_, row) =>
    columns.map((_name, column) => {
      const value = values[row]?.[column];
      const [x, y] = [left + column * wide, top + row * high];
      const rect = `<rect x="${x}" y="${y}" width="${wide}" height="${high}" fill="${colour(value)}"/>`;
      return rect + (value === null || value === undefined ? "" : text(x + wide / 2, y + 17, format(value)));
    }),
  );
  const [width, height] = [left + columns.length * wide + 12, top + rows.length * high + 12];
  return new Blob(
    [
      `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}" viewBox="0 0 ${width} ${height}" font-family="sans-serif" font-size="12">`,
      `<rect width="100%" height="100%" fill="${paper}"/>`,
      text(12, 20, `${scale.label}: ${rowLabel} by ${columnLabel}`, "start"),
      ...columns.map((name, column) => text(left + (column + 0.5) * wide, top - 8, name)),
      ...rows.map((name, row) => text(left - 8, top + row * high + 17, name, "end")),
      ...cells,
      "</svg>",
    ],
    { type: "image/svg+xml" },
  );
}
