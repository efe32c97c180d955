"""The arguments that messages name, each as the shell spells it and as Python does, and texts that are put together of them."""

from __future__ import annotations

from collections.abc import Callable


class Wording(str):
    """A text that names arguments: as a `str` it is what the shell shows, `in_python` what Python shows.

    It is put together by `+`; in an f-string, only what the shell shows would be left.
    """

    in_python: str

    def __new__(cls, in_shell: str, in_python: str) -> Wording:
        """The same text in both spellings."""
        text = super().__new__(cls, in_shell)
        text.in_python = in_python
        return text

    @classmethod
    def of(cls, text: object) -> Wording:
        """Any text; one that names no argument is the same in both."""
        return text if isinstance(text, Wording) else cls(str(text), str(text))

    def each(self, change: Callable[[str], str]) -> Wording:
        """Both spellings, changed."""
        return Wording(change(str(self)), change(self.in_python))

    def __add__(self, more: str) -> Wording:
        return Wording(str(self) + str(more), self.in_python + Wording.of(more).in_python)

    def __radd__(self, before: str) -> Wording:
        return Wording.of(before) + self

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]  # for pickle
        return str(self), self.in_python


MEMORY_LIMIT = Wording("--memory-limit", "memory_limit")
THREADS = Wording("--threads", "threads")
SCHEDULER = Wording("--scheduler", "scheduler")
OVERWRITE = Wording("--overwrite", "overwrite=True")
FORCE = Wording("--force", "force=True")
SOURCE = Wording("--source", "source")

# of conversions
LIKE = Wording("--like", "like")
NEW_LABELS = Wording("--new-labels", "new_labels")
BESIDE = Wording("--beside", "beside")
OBSERVED = Wording("--observed", "observed")
FORMAT = Wording("--format", "format")
LABELS = Wording("--labels", "labels")
LABELS_COUNT = Wording("--labels-count", "n_labels")
FEATURES = Wording("--features", "n_features")
ZERO_BASED = Wording("--zero-based", "base=0")
ONE_BASED = Wording("--one-based", "base=1")
COLUMNS = Wording("--columns", "columns")
NORMALIZE_L2 = Wording("--normalize l2", "normalize='l2'")
ON_ERROR_SKIP = Wording("--on-error=skip", "skip=True")
DUPLICATES_SUM = Wording("--duplicates=sum", "sum_duplicates=True")
UNSEEN_DROP = Wording("--unseen=drop", "drop_unseen=True")
LABEL_NAMES = Wording("--label-names", "label_names")
LABEL_KEY = Wording("--label-key", "label_key")
LAYER = Wording("--layer", "layer")
DELIMITER = Wording("--delimiter", "delimiter")
QUOTE = Wording("--quote", "quote")
QUOTE_NONE = Wording("--quote ''", "quote=''")
NO_HEADER = Wording("--no-header", "header=False")
TEXT_FIELD = Wording("--text-field", "text=TextOptions(text_fields=...)")
LABEL_FIELD = Wording("--label-field", "text=TextOptions(label_field=...)")
ID_FIELD = Wording("--id-field", "text=TextOptions(id_field=...)")
LABEL_DELIMITER = Wording("--label-delimiter", "text=TextOptions(label_delimiter=...)")
LABEL_LISTS = Wording("--label-lists", "text=TextOptions(label_lists=True)")
LABEL_IDS = Wording("--label-ids", "label_ids")

# of methods and models
SET = Wording("--set ", "")  # a parameter of a method is an argument by itself
GRID = Wording("--grid", "grid")
CALIBRATE = Wording("--calibrate", "calibrate")
WARM_START = Wording("--warm-start", "warm_start")
SAMPLE_WEIGHT = Wording("--sample-weight", "sample_weight")
CLASS_WEIGHT = Wording("--class-weight", "class_weight")
TREE = Wording("--tree", "tree")
FILTER = Wording("--filter", "filter")
K = Wording("-k", "k")
BEAM = Wording("--beam", "beam")

NTHREADS = Wording("--nthreads", "nthreads")  # of a worker of dask
