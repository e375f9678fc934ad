// Light or dark: as the system says, until somebody chooses; the browser remembers the choice.
import { computed, effect, signal } from "@preact/signals";
import { recall, remember } from "./memory";

const system = matchMedia("(prefers-color-scheme: dark)");
const systemIsDark = signal(system.matches);
system.addEventListener("change", (event) => (systemIsDark.value = event.matches));

const THEME = "logsteer-theme";

const chosen = signal<string | null>(recall(THEME));

export const isDark = computed(() =>
  chosen.value === null ? systemIsDark.value : chosen.value === "dark",
);

export function switchTheme(): void {
  chosen.value = isDark.value ? "light" : "dark";
  remember(THEME, chosen.value);
}

effect(() => {
  document.documentElement.dataset.theme = isDark.value ? "dark" : "light";
});
