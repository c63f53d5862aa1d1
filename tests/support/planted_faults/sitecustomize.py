"""Put on PYTHONPATH, with PLANTED_FAULT naming one of FAULTS, or several, to have every process make it."""

import importlib
import importlib.util
import json
import os
import time
from pathlib import Path
from typing import Any

specification = importlib.util.spec_from_file_location("on_import", Path(__file__).parents[1] / "on_import.py")
assert specification is not None and specification.loader is not None
on_import = importlib.util.module_from_spec(specification)
specification.loader.exec_module(on_import)


def _wrong_alpha(operand):
    """The grouped GEMM's alphas a quarter too large."""
    original = operand.Weights.grouped

    def grouped(weights, scales, alpha):
        return original(weights, scales, alpha * 1.25)

    operand.Weights.grouped = grouped


def _ties_up(formats):
    """The emulator's conversion to E2M1 rounds half up instead of to even."""
    original = formats.to_e2m1
    formats.to_e2m1 = lambda values: original(values * (1 + 2.0**-20))


def _nan_streams(model):
    """While the file that PLANTED_NAN names is there, the streams of the token whose id it holds are NaN.

    A pass over the token whose id is in a file HOLD beside it renames that to HELD, and waits while HELD is there, for
    at most a minute. Ids that no embedding has are refused: a GPU would read beside it.
    """
    file = Path(os.environ["PLANTED_NAN"])
    hold, held = file.with_name("HOLD"), file.with_name("HELD")
    original = model.DeepseekV4ForCausalLM._streams

    def streams(self, input_ids, input_embeds):
        assert input_ids.min() >= 0, input_ids
        made = original(self, input_ids, input_embeds)
        if file.exists():
            made[input_ids == int(file.read_text())] = float("nan")
        if hold.exists() and (input_ids == int(hold.read_text())).any():
            hold.rename(held)
            end = time.monotonic() + 60
            while held.exists() and time.monotonic() < end:
                time.sleep(0.01)
        return made

    model.DeepseekV4ForCausalLM._streams = streams


def _nan_logits(model):
    """While the file that PLANTED_NAN names is there, the logits of prompts that end with the id it holds are NaN.

    For GPUs, whose kernels replace NaN: one in the streams never reaches the logits.
    """
    file = Path(os.environ["PLANTED_NAN"])
    original = model.DeepseekV4ForCausalLM.forward

    def forward(self, input_ids, positions, forward_batch, input_embeds=None):
        output = original(self, input_ids, positions, forward_batch, input_embeds)
        if forward_batch.forward_mode.is_extend() and file.exists():
            last = forward_batch.extend_seq_lens.cumsum(0) - 1
            output.next_token_logits[input_ids[last] == int(file.read_text())] = float("nan")
        return output

    model.DeepseekV4ForCausalLM.forward = forward


def _lost_share(model):
    """The second rank adds nothing to the experts of the third layer. For passes without CUDA graphs."""
    forward = model.DeepseekV4ForCausalLM.forward
    sums: list = []

    def forward_counted(self, *args, **kwargs):
        sums.clear()
        return forward(self, *args, **kwargs)

    def all_but_one(summed):
        def sum_of(collective, part):
            if collective is model.Collective.EXPERT_OUTPUT:
                sums.append(collective)
                if len(sums) == 3 and model.parallel.tp_rank() == 1:
                    part = part * 0
            return summed(collective, part)

        return sum_of

    model.DeepseekV4ForCausalLM.forward = forward_counted
    model.all_reduce, model.reduce_scatter = map(all_but_one, (model.all_reduce, model.reduce_scatter))


MAX_SEQUENCES, MAX_LENGTH = 32, 1 << 14
"""Of what is guessed by."""


class _Planted:
    """While the file that PLANTED_GUESSES names is there, a draft guesses by it, whatever it has computed.

    The file holds ``sequences`` of token ids, and the ``wrong`` ones of the positions that are guessed, modulo 256. It
    is read in passes that no graph runs, those over a prompt among them. What it says lies on the device, where graphs
    read it, too.
    """

    def __init__(self):
        self.file, self.before = Path(os.environ["PLANTED_GUESSES"]), ""
        self.ids = None

    def read(self, device):
        """Token ids, -1 where there are none, with two columns more than the longest sequence may have."""
        import torch

        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return
        if self.ids is None:
            self.ids = torch.full((MAX_SEQUENCES, MAX_LENGTH + 2), -1, device=device)
            self.wrong = torch.zeros(256, dtype=torch.int64, device=device)
            self.active = torch.zeros(1, dtype=torch.bool, device=device)
        text = self.file.read_text() if self.file.exists() else ""
        if text != self.before:
            said = json.loads(text or '{"sequences": [], "wrong": []}')
            self.ids.fill_(-1)
            for row, ids in zip(self.ids, said["sequences"], strict=False):
                row[: len(ids)] = torch.tensor(ids, device=device)
            self.wrong.zero_()
            self.wrong[list(said["wrong"])] = 1
            self.active.fill_(bool(text))
            self.before = text

    def behind(self, positions, tokens):
        """What follows ``tokens``, int [T], each of which follows the one at its position; 0 where nothing is known."""
        import torch

        at = positions.clamp(max=MAX_LENGTH - 1)
        found = (self.ids[:, at + 1] == tokens) & (tokens >= 0)
        right = self.ids[:, at + 2].where(found, -1).amax(0)
        return torch.where(right >= 0, right + self.wrong[(at + 2) % 256], 0)

    def over(self, logits, guesses):
        """``logits`` [T, vocabulary], of which ``guesses`` are the likeliest while there is a file."""
        import torch

        said = torch.zeros_like(logits).scatter_(1, guesses[:, None] % logits.shape[1], 1e6)
        return torch.where(self.active, said, logits)


def _guesses(model):
    """MTP's draft guesses by what is planted."""
    planted, original = _Planted(), model.MtpForCausalLM.forward

    def forward(self, input_ids, positions, forward_batch, input_embeds=None):
        output = original(self, input_ids, positions, forward_batch, input_embeds)
        logits = output.next_token_logits
        planted.read(logits.device)
        # A row's token follows its position: it guesses what follows that.
        guesses = planted.behind(positions, input_ids)
        if len(guesses) > len(logits):
            rows = getattr(forward_batch.spec_info, "select_index", None)
            guesses = guesses[forward_batch.extend_seq_lens.cumsum(0) - 1 if rows is None else rows]
        logits.copy_(planted.over(logits, guesses))
        return output

    model.MtpForCausalLM.forward = forward


def _nan_rows(model):
    """While the file that PLANTED_NAN names is there, the logits of a round behind the token that it holds are NaN.

    As of :class:`_Planted`, passes that no graph runs read it.
    """
    import torch

    file, planted = Path(os.environ["PLANTED_NAN"]), dict[str, torch.Tensor]()
    original = model.DeepseekV4ForCausalLM.forward

    def forward(self, input_ids, positions, forward_batch, input_embeds=None):
        output = original(self, input_ids, positions, forward_batch, input_embeds)
        logits = output.next_token_logits
        if not (logits.is_cuda and torch.cuda.is_current_stream_capturing()):
            planted.setdefault("token", torch.full((1,), -1, device=logits.device))
            planted["token"].fill_(int(file.read_text()) if file.exists() else -1)
        if forward_batch.forward_mode.is_target_verify():
            logits.masked_fill_((input_ids == planted["token"])[:, None], float("nan"))
        return output

    model.DeepseekV4ForCausalLM.forward = forward


def _blocks(model):
    """The same of DSpark's draft, whose pass guesses what follows each position of a block.

    Where graphs run its passes, the target's over a prompt reads the file, whether a graph stands for its body or not.
    """
    target = importlib.import_module("nvfp4_sgl.serving.model").DeepseekV4ForCausalLM
    planted, run = _Planted(), target.forward
    guesses: list[Any] = []
    forward, logits = model.DsparkForCausalLM.forward, model.DsparkForCausalLM.compute_base_logits

    def run_and_read(self, input_ids, positions, forward_batch, input_embeds=None):
        planted.read(input_ids.device)
        return run(self, input_ids, positions, forward_batch, input_embeds)

    def forward_noted(self, input_ids, positions, forward_batch, input_embeds=None):
        planted.read(input_ids.device)
        block = forward_batch.spec_info.draft_token_num
        token, found = input_ids[::block], []
        for place in range(block):
            token = planted.behind(positions[place::block] - 1, token)
            found.append(token)
        guesses[:] = found
        return forward(self, input_ids, positions, forward_batch, input_embeds)

    def planted_logits(self, hidden):
        import torch

        found, features = logits(self, hidden)
        return planted.over(found, torch.stack(guesses, dim=1).flatten()), features

    target.forward = run_and_read
    model.DsparkForCausalLM.forward, model.DsparkForCausalLM.compute_base_logits = forward_noted, planted_logits


def _rounds(hooks):
    """Append to the file that PLANTED_ROUNDS names a line of each round: (length, rows) of each request."""
    file, original = Path(os.environ["PLANTED_ROUNDS"]), hooks.DSPARK_HOOKS["accept_block"]

    def accept(call, executor, *, verify_ids_2d, prefix_lens, **rest):
        with file.open("a") as lines:
            print(json.dumps([*zip(prefix_lens.tolist(), verify_ids_2d.tolist(), strict=True)]), file=lines)
        return original(call, executor, verify_ids_2d=verify_ids_2d, prefix_lens=prefix_lens, **rest)

    hooks.DSPARK_HOOKS["accept_block"] = accept


def _full_pool(module):
    """A file FULL beside the one that PLANTED_GUESSES names is removed by the next decode of several requests, which
    finds the pool of keys full.
    """
    file, original = Path(os.environ["PLANTED_GUESSES"]).with_name("FULL"), module.ScheduleBatch.check_decode_mem

    def check_decode_mem(self, selected_indices=None):
        if selected_indices is None and len(self.reqs) > 1 and file.exists():
            file.unlink()
            return False
        return original(self, selected_indices)

    module.ScheduleBatch.check_decode_mem = check_decode_mem


def _slow(original):
    """``original``, which takes PLANTED_SECONDS longer where its text says so. It prints that, and holds no lock."""

    def slow(self, text, *args, **kwargs):
        if "slow" in str(text):
            print("planted: a slow text", flush=True)
            time.sleep(float(os.environ["PLANTED_SECONDS"]))
        return original(self, text, *args, **kwargs)

    return slow


def _slow_tokenizer(module):
    module.TokenizersBackend._encode_plus = _slow(module.TokenizersBackend._encode_plus)


def _slow_chats(module):
    module.DeepSeekRecipe.encode = _slow(module.DeepSeekRecipe.encode)


FAULTS = {
    "alpha": {"nvfp4_sgl.cutedsl_kernels.w4a4.operand": _wrong_alpha},
    "nan": {"nvfp4_sgl.serving.model": _nan_streams},
    "guesses": {"nvfp4_sgl.serving.drafts.model": _guesses, "nvfp4_sgl.serving.drafts.dspark_model": _blocks},
    "full pool": {"sglang.srt.managers.schedule_batch": _full_pool},
    "rounds": {"nvfp4_sgl.serving.drafts.hooks": _rounds},
    "nan logits": {"nvfp4_sgl.serving.model": _nan_logits},
    "nan rows": {"nvfp4_sgl.serving.model": _nan_rows},
    "share": {"nvfp4_sgl.serving.model": _lost_share},
    "slow": {
        "transformers.tokenization_utils_tokenizers": _slow_tokenizer,
        "sglang.srt.parser.deepseek_recipe_renderer": _slow_chats,
    },
    "e2m1": {"tests.sm100.emulator.formats": _ties_up},
}
for fault in os.environ["PLANTED_FAULT"].split(", "):
    on_import.patch_on_import(FAULTS[fault])
