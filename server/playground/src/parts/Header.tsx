// The head of the page: its name, the model that is asked, and light or dark.
import { isAway } from "../lib/api";
import { chosenModel, currentModel, namedModels } from "../lib/models";
import { isDark, switchTheme } from "../lib/theme";
import { useCopy } from "./CopyAs";
import { isHelpWanted } from "./HelpDialog";
import { Icon } from "./Icon";

export function Header() {
  const all = namedModels.value;
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
            <span class={`state-dot is-${isAway.value ? "failed" : current.state}`} aria-hidden="true" />
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
              {isAway.value ? "no answer" : current.state !== "ready" ? current.state : current.variant_of ? `variant of ${current.variant_of}` : current.engine}
            </span>
          </>
        )}
      </div>
      <LinkButton />
      <button
        type="button"
        class="icon-button"
        onClick={() => (isHelpWanted.value = true)}
        aria-label="Keys of this page"
        title="Keys of this page: ?"
      >
        <Icon name="help" />
      </button>
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

/** Copies the address, which has the view and what is in its fields. */
function LinkButton() {
  const [isCopied, copy] = useCopy();
  return (
    <button
      type="button"
      class="icon-button"
      onClick={() => void copy(location.href)}
      aria-label={isCopied ? "Link copied" : "Copy a link to this"}
      title="Copy a link to this"
    >
      <Icon name={isCopied ? "check" : "link"} />
    </button>
  );
}
