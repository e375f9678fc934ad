// Tables as files: CSV and JSON lines, read and written.

/** The cells of a text as CSV: between commas, semicolons or tabs, in quotes where one of them is inside. */
export function parseCsv(text: string): string[][] {
  const first = text.slice(0, text.indexOf("\n") >>> 0);
  const between = ["\t", ";", ","].find((mark) => first.includes(mark)) ?? ",";
  const rows: string[][] = [];
  let [row, cell, isQuoted] = [[] as string[], "", false];
  const end = (): void => {
    if (row.length > 0 || cell !== "") rows.push([...row, cell]);
    [row, cell] = [[], ""];
  };
  for (let at = 0; at < text.length; at += 1) {
    const mark = text[at] as string;
    if (isQuoted) {
      if (mark !== '"') cell += mark;
      else if (text[at + 1] === '"') [cell, at] = [`${cell}"`, at + 1];
      else isQuoted = false;
    } else if (mark === '"' && cell === "") isQuoted = true;
    else if (mark === between) [row, cell] = [[...row, cell], ""];
    else if (mark === "\n") end();
    else if (mark !== "\r") cell += mark;
  }
  end();
  return rows;
}

/** A question of a table: a context, what may follow it, and which of that is right, where the table says so. */
export interface Case {
  context: string;
  targets: string[];
  answer: number | null;
}

function findAnswer(given: unknown, targets: string[], line: number): number | null {
  if (given === undefined || given === null || given === "") return null;
  const index = targets.findIndex((target) => target === given || target.trim() === given);
  const number = index >= 0 ? index : Number(given);
  if (Number.isInteger(number) && number >= 0 && number < targets.length) return number;
  throw new Error(`Line ${line}: the answer “${String(given)}” is neither a target nor the number of one, counted from 0.`);
}

/**
 * Read a table of questions: JSON lines with `context`, `targets` and perhaps `answer`, or CSV with a
 * column `context`, perhaps one `answer`, and each other column a target. Throws Error with the line.
 */
export function readCases(text: string): Case[] {
  const make = (context: unknown, targets: unknown, answer: unknown, line: number): Case => {
    if (typeof context !== "string" || !Array.isArray(targets)) throw new Error(`Line ${line} has no context, or no targets.`);
    const given = targets.filter((target): target is string => typeof target === "string" && target !== "");
    if (given.length === 0) throw new Error(`Line ${line} has no target.`);
    return { context, targets: given, answer: findAnswer(answer, given, line) };
  };
  if (/^\s*\{/.test(text)) {
    return text.split("\n").flatMap((line, at) => {
      if (line.trim() === "") return [];
      let row: Partial<Record<"context" | "targets" | "answer", unknown>>;
      try {
        row = JSON.parse(line) as typeof row;
      } catch {
        throw new Error(`Line ${at + 1} is not JSON.`);
      }
      return [make(row.context, row.targets, row.answer, at + 1)];
    });
  }
  const [head = [], ...rows] = parseCsv(text);
  const names = head.map((name) => name.trim().toLowerCase());
  const [context, answer] = [names.indexOf("context"), names.indexOf("answer")];
  if (context < 0) throw new Error("The first line names no column context: it is the head of the table.");
  return rows.map((row, at) => {
    const targets = row.filter((_, column) => column !== context && column !== answer);
    return make(row[context], targets, row[answer], at + 2);
  });
}

/** A table as CSV: what has a comma, a quote or a line end stands in quotes. */
export function writeCsv(head: readonly string[], rows: readonly (readonly (string | number | null | undefined)[])[]): string {
  const cell = (value: string | number | null | undefined): string => {
    const text = String(value ?? "");
    return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return `${[head, ...rows].map((row) => row.map(cell).join(",")).join("\n")}\n`;
}

/** Return a file's text. Throws Error where it is not text. */
export async function readFile(file: File): Promise<string> {
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch {
    throw new Error(`${file.name} is not UTF-8 text.`);
  }
}
