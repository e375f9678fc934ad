// Inputs with their labels. Each calls `onChange` with a value of its own type, at every keystroke.
import type { ComponentChildren } from "preact";
import { useCallback, useEffect, useId, useLayoutEffect, useRef, useState } from "preact/hooks";
import { bytes } from "../lib/format";
import { Icon } from "./Icon";

interface Labelled {
  label: string;
  /** What the label does not say; read out with the field. */
  hint?: ComponentChildren;
}

interface FieldProps extends Labelled {
  /** Given the ids that its input takes: `id`, and `aria-describedby`. */
  children: (ids: { id: string; "aria-describedby"?: string }) => ComponentChildren;
  /** Shown at the right of the label, such as the value of a slider. */
  value?: ComponentChildren;
}

/** A label, an input, and a hint. */
export function Field({ label, hint, value, children }: FieldProps) {
  const id = useId();
  return (
    <div class="field">
      <div class="field-head">
        <label for={id}>{label}</label>
        {value !== undefined && <span class="field-value num">{value}</span>}
      </div>
      {children({ id, "aria-describedby": hint ? `${id}-hint` : undefined })}
      {hint && (
        <div class="hint" id={`${id}-hint`}>
          {hint}
        </div>
      )}
    </div>
  );
}

interface TextProps extends Labelled {
  value: string;
  onChange: (value: string) => void;
  placeholder?: string;
}

export function TextField({ label, hint, value, onChange, placeholder }: TextProps) {
  return (
    <Field label={label} hint={hint}>
      {(ids) => (
        <input
          {...ids}
          type="text"
          dir="auto"
          spellcheck={false}
          autocomplete="off"
          placeholder={placeholder}
          value={value}
          onInput={(event) => onChange(event.currentTarget.value)}
        />
      )}
    </Field>
  );
}

/** Characters from which on a text is as high as it may be, whatever its lines are. */
const LONG_VALUE = 4000;

/** Several lines, as high as the text up to `maxRows`. */
export function TextArea(props: TextProps & { rows?: number; maxRows?: number }) {
  const { label, hint, value, onChange, placeholder, rows = 3, maxRows = 14 } = props;
  const area = useRef<HTMLTextAreaElement>(null);
  const fit = useCallback(() => {
    const element = area.current;
    // What is hidden has no height; it is fitted once it is shown.
    if (element === null || element.offsetParent === null) return;
    const line = parseFloat(getComputedStyle(element).lineHeight) || 24;
    const highest = maxRows * line;
    let height = highest;
    if (element.value.length < LONG_VALUE) {
      element.style.height = "0";
      height = Math.min(Math.max(element.scrollHeight + 2, rows * line), highest);
    }
    element.style.height = `${height}px`;
  }, [rows, maxRows]);
  useLayoutEffect(fit, [value, fit]);
  useEffect(() => {
    let width = 0;
    const observer = new ResizeObserver(([entry]) => {
      const next = entry?.contentRect.width ?? 0;
      if (next !== width) fit();
      width = next;
    });
    if (area.current !== null) observer.observe(area.current);
    // Lines may break elsewhere in the page's own type.
    void document.fonts.ready.then(fit);
    return () => observer.disconnect();
  }, [fit]);
  return (
    <Field label={label} hint={hint}>
      {(ids) => (
        <textarea
          {...ids}
          ref={area}
          dir="auto"
          spellcheck={false}
          placeholder={placeholder}
          rows={rows}
          value={value}
          onInput={(event) => onChange(event.currentTarget.value)}
        />
      )}
    </Field>
  );
}

interface NumberProps extends Labelled {
  value: number | null;
  onChange: (value: number | null) => void;
  min?: number;
  max?: number;
  step?: number | "any";
  placeholder?: string;
}

/** A number, or null where the field is empty. */
export function NumberField({ label, hint, value, onChange, ...rest }: NumberProps) {
  return (
    <Field label={label} hint={hint}>
      {(ids) => (
        <input
          {...ids}
          {...rest}
          type="number"
          class="num"
          value={value ?? ""}
          onInput={(event) => {
            const typed = event.currentTarget.value;
            const parsed = Number(typed);
            if (typed === "") onChange(null);
            else if (Number.isFinite(parsed)) onChange(parsed);
          }}
        />
      )}
    </Field>
  );
}

interface SliderProps extends Labelled {
  value: number;
  onChange: (value: number) => void;
  min: number;
  max: number;
  step?: number;
  format?: (value: number) => string;
  /** Marks under the slider, such as 0. */
  ticks?: number[];
}

export function Slider(props: SliderProps) {
  const { label, hint, value, onChange, min, max, step = 1, format = String, ticks } = props;
  const list = useId();
  return (
    <Field label={label} hint={hint} value={format(value)}>
      {(ids) => (
        <>
          <input
            {...ids}
            type="range"
            min={min}
            max={max}
            step={step}
            value={value}
            list={ticks && list}
            aria-valuetext={format(value)}
            onInput={(event) => onChange(event.currentTarget.valueAsNumber)}
          />
          {ticks && (
            <datalist id={list}>
              {ticks.map((tick) => (
                <option key={tick} value={tick} />
              ))}
            </datalist>
          )}
        </>
      )}
    </Field>
  );
}

export interface Option<T extends string> {
  value: T;
  label: string;
  disabled?: boolean;
}

interface SelectProps<T extends string> extends Labelled {
  value: T;
  options: readonly Option<T>[];
  onChange: (value: T) => void;
}

export function Select<T extends string>({ label, hint, value, options, onChange }: SelectProps<T>) {
  return (
    <Field label={label} hint={hint}>
      {(ids) => (
        <span class="select">
          <select
            {...ids}
            value={value}
            onChange={(event) => onChange(event.currentTarget.value as T)}
          >
            {options.map((option) => (
              <option key={option.value} value={option.value} disabled={option.disabled}>
                {option.label}
              </option>
            ))}
          </select>
        </span>
      )}
    </Field>
  );
}

/** A few options side by side, one of which holds. */
export function Segments<T extends string>({ label, value, options, onChange }: SelectProps<T>) {
  const name = useId();
  return (
    <fieldset class="segments">
      <legend>{label}</legend>
      <div class="segments-row">
        {options.map((option) => (
          <label key={option.value} class={option.value === value ? "is-chosen" : ""}>
            <input
              type="radio"
              name={name}
              checked={option.value === value}
              disabled={option.disabled}
              onChange={() => onChange(option.value)}
            />
            <span>{option.label}</span>
          </label>
        ))}
      </div>
    </fieldset>
  );
}

interface CheckProps extends Labelled {
  value: boolean;
  onChange: (value: boolean) => void;
}

export function Checkbox({ label, hint, value, onChange }: CheckProps) {
  return (
    <label class="checkbox">
      <input
        type="checkbox"
        checked={value}
        onChange={(event) => onChange(event.currentTarget.checked)}
      />
      <span>
        {label}
        {hint && <small class="hint">{hint}</small>}
      </span>
    </label>
  );
}

interface TakeProps {
  onTake: (files: FileList | null | undefined) => void;
}

/** Takes files that are dropped on what it holds. */
export function Drop({ onTake, children }: TakeProps & { children: ComponentChildren }) {
  const [isOver, setOver] = useState(false);
  return (
    <div
      class={`drop ${isOver ? "is-over" : ""}`}
      onDragOver={(event) => {
        event.preventDefault();
        setOver(true);
      }}
      onDragLeave={() => setOver(false)}
      onDrop={(event) => {
        event.preventDefault();
        setOver(false);
        onTake(event.dataTransfer?.files);
      }}
    >
      {children}
    </div>
  );
}

/** The file that was chosen, and a button to put it away. */
export function ChosenFile({ file, onRemove }: { file: File; onRemove: () => void }) {
  return (
    <p class="file">
      <Icon name="file" />
      <b>{file.name}</b> <span class="hint">{bytes(file.size)}</span>
      <button type="button" class="quiet" onClick={onRemove}>
        <Icon name="close" /> Put it away
      </button>
    </p>
  );
}

/** A button that asks for a file. */
export function FileButton({ label, accept, onTake }: TakeProps & { label: string; accept?: string }) {
  const input = useRef<HTMLInputElement>(null);
  return (
    <>
      <input
        ref={input}
        type="file"
        class="off-screen"
        tabIndex={-1}
        aria-label={`File: ${label}`}
        accept={accept}
        onChange={(event) => {
          onTake(event.currentTarget.files);
          event.currentTarget.value = "";
        }}
      />
      <button type="button" class="quiet" onClick={() => input.current?.click()}>
        <Icon name="file" /> {label}
      </button>
    </>
  );
}
