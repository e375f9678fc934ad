// Small drawings, 24 by 24, in the colour of the text around them.
const PATHS = {
  text: "M4 6h16M4 12h11M4 18h14",
  choices: "M4 7h14M4 12h8M4 17h4",
  steer: "M4 18C10 18 9 6 20 6M15 3l5 3-4 4",
  sweep: "M4 4v16h16M7 15c4 0 5-9 12-9",
  inside: "M4 4h16v16H4zM4 9.3h16M4 14.7h16M9.3 4v16M14.7 4v16",
  examples: "M4 5h16M4 19h16M4 12h4M12 9h8v6h-8z",
  vectors: "M5 19L18 6M11 6h7v7M5 12v7h7",
  models: "M4 7l8-4 8 4-8 4zM4 12l8 4 8-4M4 17l8 4 8-4",
  sessions: "M4 5h16v4H4zM5 9v10h14V9M9 13h6",
  pin: "M9 3h6l-1 6 4 4H6l4-4zM12 13v8",
  pen: "M4 20l1-5L16 4l4 4L9 19z",
  help: "M9 9a3 3 0 1 1 4 3c-1 .5-1 1-1 2M12 18v.5",
  moon: "M20 14.5A8.5 8.5 0 1 1 9.5 4a7 7 0 0 0 10.5 10.5z",
  sun: "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8zM12 2v2M12 20v2M2 12h2M20 12h2M5 5l1.5 1.5M17.5 17.5L19 19M19 5l-1.5 1.5M6.5 17.5L5 19",
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  check: "M5 12.5l4.5 4.5L19 7.5",
  close: "M6 6l12 12M18 6L6 18",
  play: "M7 5l12 7-12 7z",
  pause: "M8 6v12M16 6v12",
  stop: "M7 7h10v10H7z",
  key: "M8 11a4 4 0 1 0 0 8 4 4 0 0 0 0-8zM11 12l9-9M16 7l3 3",
  link: "M9 15l6-6M10 6l2-2a4 4 0 0 1 6 6l-2 2M14 18l-2 2a4 4 0 0 1-6-6l2-2",
  file: "M6 3h8l4 4v14H6zM14 3v4h4",
  plus: "M12 5v14M5 12h14",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
  down: "M12 4v12M7 11l5 5 5-5M5 20h14",
  up: "M12 20V8M7 13l5-5 5 5M5 4h14",
  warn: "M12 3l10 18H2zM12 10v5M12 18v.5",
} as const;

export type IconName = keyof typeof PATHS;

export function Icon({ name }: { name: IconName }) {
  return (
    <svg class="icon" viewBox="0 0 24 24" aria-hidden="true" focusable="false">
      <path d={PATHS[name]} />
    </svg>
  );
}
