// What steering did, in words: measured in the model, not taken from the request.
import type { Schemas } from "../lib/api";
import { number, plural } from "../lib/format";

/** Layers up to which each has a line that is always shown. */
const FEW = 6;

interface ReceiptProps {
  receipt: Schemas["SteeringReceipt"];
  title?: string;
}

export function Receipt({ receipt, title = "What steering did" }: ReceiptProps) {
  const sites = Object.entries(receipt.layers);
  const shares = sites.map(([, did]) => 100 * (did.relative_norm ?? 0));
  const list = (
    <ul>
      {sites.map(([site, did]) => (
        <li key={site}>
          Layer <span class="num">{site}</span> changed at {plural(did.tokens, "token")}
          {typeof did.relative_norm === "number" && (
            <>
              , by <span class="num">{number(100 * did.relative_norm)} %</span> of the stream's own
              length on average
            </>
          )}
          .
        </li>
      ))}
    </ul>
  );
  return (
    <section class="receipt" aria-label="Receipt">
      <h3>{title}</h3>
      <p>
        {plural(receipt.tokens_steered, "token")} {receipt.tokens_steered === 1 ? "was" : "were"}{" "}
        read under steering by{" "}
        {receipt.vectors.map((vector, index) => (
          <span key={index}>
            {index > 0 && (index === receipt.vectors.length - 1 ? " and " : ", ")}
            <b>{vector.name ?? `the vector ${vector.sha256.slice(0, 10)}…`}</b> at scale{" "}
            <span class="num">{number(vector.scale)}</span>
            {vector.passed !== null && vector.passed !== undefined && (
              <> (its condition held at {plural(vector.passed, "token")})</>
            )}
            {vector.other_weights && " (trained on other weights)"}
          </span>
        ))}
        .
      </p>
      {sites.length <= FEW ? list : (
        <details class="more">
          <summary>
            {plural(sites.length, "layer")} changed, by {number(Math.min(...shares))} to {number(Math.max(...shares))} % of the
            stream's own length on average
          </summary>
          {list}
        </details>
      )}
    </section>
  );
}
