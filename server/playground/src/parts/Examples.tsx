// Inputs that are worth a look, one click each.

export interface Example<S> {
  label: string;
  state: Partial<S>;
}

interface ExamplesProps<S> {
  examples: readonly Example<S>[];
  onChoose: (state: Partial<S>) => void;
}

export function Examples<S>({ examples, onChoose }: ExamplesProps<S>) {
  return (
    <div class="examples" role="group" aria-label="Examples">
      <span class="hint">Try</span>
      {examples.map((example) => (
        <button key={example.label} type="button" class="chip" onClick={() => onChoose(example.state)}>
          {example.label}
        </button>
      ))}
    </div>
  );
}
