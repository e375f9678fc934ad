// Rows of numbers and texts, sorted by a click on a head; they can be taken away as CSV.
import type { ComponentChildren } from "preact";
import { useMemo, useState } from "preact/hooks";
import { writeCsv } from "../lib/tables";
import { Icon } from "./Icon";
import { save } from "./LineChart";

export type Cell = number | string | null | undefined;

export interface TableColumn<Row> {
  name: string;
  /** What it is sorted by, and what the file has. */
  value: (row: Row) => Cell;
  /** What is seen, where that is not the value. */
  show?: (row: Row) => ComponentChildren;
  isText?: boolean;
  /** The first click has the largest first. */
  isDescending?: boolean;
}

interface TableProps<Row> {
  label: string;
  rows: readonly Row[];
  columns: readonly TableColumn<Row>[];
  /** Called with the row whose first cell is pressed. */
  onChoose?: (row: Row) => void;
  isChosen?: (row: Row) => boolean;
  /** Name of the file; no button without it. */
  exportName?: string;
}

interface Order {
  column: number;
  isDescending: boolean;
}

function compare(a: Cell, b: Cell): number {
  if (typeof a === "number" && typeof b === "number") return a - b;
  return String(a).localeCompare(String(b), "en", { numeric: true });
}

export function Table<Row>({ label, rows, columns, onChoose, isChosen, exportName }: TableProps<Row>) {
  const [order, setOrder] = useState<Order | null>(null);
  const sorted = useMemo(() => {
    const value = order === null ? undefined : columns[order.column]?.value;
    if (value === undefined || order === null) return rows;
    const sign = order.isDescending ? -1 : 1;
    // What has no value comes last either way.
    const [known, unknown] = [true, false].map((is) => rows.filter((row) => (value(row) ?? null) !== null === is));
    return [...(known ?? []).sort((a, b) => sign * compare(value(a), value(b))), ...(unknown ?? [])];
  }, [rows, columns, order]);
  const sortBy = (column: number): void =>
    setOrder((old) =>
      old?.column === column
        ? { column, isDescending: !old.isDescending }
        : { column, isDescending: columns[column]?.isDescending ?? false },
    );
  return (
    <div>
      {exportName && (
        <div class="table-head">
          <h2>{label}</h2>
          <button
            type="button"
            class="quiet"
            onClick={() =>
              save(
                new Blob([writeCsv(columns.map(({ name }) => name), sorted.map((row) => columns.map(({ value }) => value(row))))], { type: "text/csv" }),
                `${exportName}.csv`,
              )
            }
          >
            <Icon name="down" /> CSV
          </button>
        </div>
      )}
      <div class="table" tabIndex={0} role="region" aria-label={label}>
        <table class="num">
          <thead>
            <tr>
              {columns.map((column, at) => (
                <th
                  key={at}
                  scope="col"
                  class={column.isText ? "is-text" : ""}
                  aria-sort={order?.column === at ? (order.isDescending ? "descending" : "ascending") : undefined}
                >
                  <button type="button" onClick={() => sortBy(at)}>
                    {column.name}
                    {order?.column === at && <span aria-hidden="true">{order.isDescending ? " ↓" : " ↑"}</span>}
                  </button>
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {sorted.map((row, index) => (
              <tr
                key={index}
                class={`${onChoose ? "can-choose" : ""} ${isChosen?.(row) ? "is-chosen" : ""}`}
                onClick={() => onChoose?.(row)}
              >
                {columns.map((column, at) => {
                  const shown = column.show ? column.show(row) : (column.value(row) ?? "–");
                  const style = column.isText ? "is-text" : "";
                  if (at > 0) return <td key={at} class={style}>{shown}</td>;
                  return (
                    <th key={at} scope="row" class={style}>
                      {onChoose ? (
                        <button type="button" class="quiet" aria-pressed={isChosen?.(row) ?? false}>
                          {shown}
                        </button>
                      ) : (
                        shown
                      )}
                    </th>
                  );
                })}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </div>
  );
}
