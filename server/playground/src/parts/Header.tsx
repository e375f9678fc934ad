// The head of the page: its name, the model that is asked, and light or dark.
import { chosenModel, currentModel, models } from "../lib/models";
import { isDark, switchTheme } from "../lib/theme";
import { Icon } from "./Icon";

export function Header() {
  const all = models.value;
  const current = currentModel.value;
  return (
    <header class="head">
      <a class="wordmark" href="#text" aria-label="logsteer">
        <svg viewBox="0 0 32 32" aria-hidden="true">
          <path d="M3 22c7 0 8-13 14-13s6 7 12 7" />
        </svg>
        logsteer
      </a>
      <div class="head-model">
        {current && (
          <>
            <span class={`state-dot is-${current.state}`} aria-hidden="true" />
            <label class="off-screen" for="model">
              Model
            </label>
            <span class="select">
              <select
                id="model"
                value={current.id}
                onChange={(event) => (chosenModel.value = event.currentTarget.value)}
              >
                {all.map((model) => (
                  <option key={model.id} value={model.id}>
                    {model.id}
                  </option>
                ))}
              </select>
            </span>
            <span class="head-state">
              {current.state === "ready" ? current.engine : current.state}
            </span>
          </>
        )}
      </div>
      <button
        type="button"
        class="icon-button"
        onClick={switchTheme}
        aria-label={isDark.value ? "Use light colours" : "Use dark colours"}
      >
        <Icon name={isDark.value ? "sun" : "moon"} />
      </button>
    </header>
  );
}
