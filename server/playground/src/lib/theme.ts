// Light or dark: as the system says, until somebody chooses; the choice lasts as long as the page.
import { computed, effect, signal } from "@preact/signals";

const system = matchMedia("(prefers-color-scheme: dark)");
const systemIsDark = signal(system.matches);
system.addEventListener("change", (event) => (systemIsDark.value = event.matches));

const chosen = signal<"light" | "dark" | null>(null);

export const isDark = computed(() =>
  chosen.value === null ? systemIsDark.value : chosen.value === "dark",
);

export function switchTheme(): void {
  chosen.value = isDark.value ? "light" : "dark";
}

effect(() => {
  document.documentElement.dataset.theme = isDark.value ? "dark" : "light";
});
