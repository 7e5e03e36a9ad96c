// Slots: who holds which, since when, and where saved KV lies. Only engines that divide their cache have some.

import { html, useEffect } from "./vendor/htm-preact.js";
import { count, seconds, time, useAdmin, whyLink } from "./parts.js";

const REFRESH_MS = 5_000;
const REQUESTS = 500; // among these, the last request on each slot is looked for
const MIB = 2 ** 20;

const Holder = ({ slot, request }) => {
  if (!slot.tokens) return "empty";
  if (!request || slot.operation === "foreign") return "not known";
  return html`${request.tenant && `${request.tenant}, `}${request.session ?? "no session"},
    ${" "}<a href=${whyLink(request.request_id)}>request of ${time(request.started)}</a>`;
};

const Files = ({ engine }) =>
  Object.entries(engine.kv.files?.tiers ?? {}).map(
    ([tier, held]) => html`<p class="note">${engine.id}: ${count(held.entries)} files on ${tier}, ${count(held.bytes / MIB)} of
      ${" "}${count(held.cap / MIB)} MiB, in <code>${held.place}</code>${held.in_memory && " (memory: a reboot loses them)"}</p>`,
  );

export const Slots = () => {
  const [stats, error, again] = useAdmin("stats");
  const [requests, , askRequests] = useAdmin(`requests?limit=${REQUESTS}`);
  useEffect(() => {
    const timer = setInterval(() => document.hidden || (again(), askRequests()), REFRESH_MS);
    return () => clearInterval(timer);
  }, []);
  const engines = (stats?.pools ?? []).flatMap((pool) => pool.engines).filter((engine) => engine.kv.slots?.length);
  const last = (engine, slot) => requests?.requests.find((each) => each.engine === engine.id && each.slot === slot.id);
  if (error) return html`<p class="problem" role="alert">${error}</p>`;
  return html`<section aria-label="Slots">
    <h2>Slots <small>who holds which</small></h2>
    <div class="scroll"><table>
      <thead><tr><th>engine</th><th class="number">slot</th><th class="number">tokens</th><th class="number">in a file</th>
        <th>runs</th><th class="number">since</th><th>held by</th></tr></thead>
      <tbody>${engines.map((engine) =>
        engine.kv.slots.map(
          (slot) => html`<tr key=${`${engine.id} ${slot.id}`}>
            <td>${engine.id}</td><td class="number">${slot.id}</td><td class="number">${count(slot.tokens)}</td>
            <td class="number">${count(slot.saved)}</td><td>${slot.operation ?? "idle"}</td>
            <td class="number">${seconds(slot.since_s)}</td>
            <td><${Holder} slot=${slot} request=${last(engine, slot)} /></td>
          </tr>`,
        ),
      )}</tbody>
    </table></div>
    ${engines.map((engine) => html`<${Files} engine=${engine} />`)}
  </section>`;
};
