"""Names for long cases that several tests prove, in `@pytest.mark.case`; docs/cases.py reads them here."""

EVALUATION = "`zerotrain evaluate RUN` of four ranks at stage 3 in bf16, on one process, or on three at stage 1"
EXPORT = (
    "`zerotrain export` of four ranks at stage 3: tied, transposed, frozen, empty, odd, "
    "integers, buffers; one file or several"
)
GENERATION = (
    "`zerotrain generate`, of bytes or a tokenizer, of a run, an interrupted one, an "
    "exported folder of any form, adapters merged or not"
)
WEIGHTS = "weights out of a safetensors file"
WRONG_RUN = (
    "half-written, damaged, cut, of another model or of no run, adapters alone, removed by its "
    "run meanwhile, no tokenizer, no such setting or one without an effect"
)
