// Use: what each tenant used of each model, by day.

import { html, useState } from "./vendor/htm-preact.js";
import { count, Paged, percent, useAdmin } from "./parts.js";

const PAGE = 30;
const DAYS = [30, 400];

export const Use = () => {
  const [days, setDays] = useState(DAYS[0]);
  const [answer, error, again] = useAdmin(`usage?days=${days}`);
  const rows = answer?.usage ?? [];
  return html`<section aria-label="Use of tenants">
    <h2>Use of tenants <button onClick=${again}>Refresh</button></h2>
    ${error && html`<p class="problem" role="alert">${error}</p>`}
    <${Paged} items=${rows} size=${PAGE} name="days">
      ${(shown) => html`<div class="scroll"><table>
        <thead><tr><th>day (UTC)</th><th>tenant</th><th>model</th><th class="number">requests</th>
          <th class="number spare">failed</th><th class="number">prompt tokens</th><th class="number">cached</th>
          <th class="number">answer tokens</th></tr></thead>
        <tbody>${shown.map(
          (each) => html`<tr key=${`${each.day} ${each.tenant} ${each.model}`}>
            <td>${each.day}</td><td>${each.tenant ?? "–"}</td><td>${each.model ?? "–"}</td>
            <td class="number">${count(each.requests)}</td><td class="number spare">${count(each.failed)}</td>
            <td class="number">${count(each.prompt_tokens)}</td>
            <td class="number">${percent(each.cached_tokens, each.prompt_tokens)}</td>
            <td class="number">${count(each.output_tokens)}</td>
          </tr>`,
        )}</tbody>
      </table></div>`}
    <//>
    ${days === DAYS[0] && html`<button onClick=${() => setDays(DAYS[1])}>Up to ${DAYS[1]} days</button>`}
    ${answer && !rows.length && html`<p class="note">No request yet.</p>`}
  </section>`;
};
