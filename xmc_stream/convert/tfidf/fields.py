"""Which fields of a record are its text, its labels and its id, where the user does not say or says it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

from xmc_stream import flags
from xmc_stream.convert.messages import meant, shown_text
from xmc_stream.convert.options import ConvertOptions, TextOptions
from xmc_stream.convert.tfidf.counting import BadRowError, LabelRows
from xmc_stream.errors import InputError

_SHOWN_FIELDS = 10
TEXT_FIELDS = ("title", "content", "text", "body", "document", "abstract", "description", "sentence")
LABEL_FIELDS = ("target_ind", "labels", "label", "tags", "categories", "topics", "classes", "category", "class")


def resolved(
    text: TextOptions, given: TextOptions, first: Mapping[str, Any], name: str, optional: bool
) -> tuple[TextOptions, str]:
    """Options with the fields that this input has, and what was chosen, in words.

    given: what was asked for of this input, which must be there; optional: whether labels may lack.
    """
    fields = text.text_fields
    if not fields:
        strings = [field for field in TEXT_FIELDS if isinstance(first.get(field), str)]
        fields = tuple(strings[: 2 if {"title", "content"} <= set(strings) else 1])
    if not fields:
        raise InputError(f"{name}:1: no text field of a common name: it has {_names(first)}: give " + flags.TEXT_FIELD)
    for kind, asked, flag in (
        ("text", fields, flags.TEXT_FIELD),
        ("label", (given.label_field,), flags.LABEL_FIELD),
        ("id", (given.id_field,), flags.ID_FIELD),
    ):
        for field in asked:
            if field and field not in first:
                raise InputError(
                    f"{name}:1: no {kind} field {shown_text(field)}{meant(field, first)}: it has {_names(first)}: give "
                    + flag
                )
    label = text.label_field
    if label is None or (label and optional and label not in first):
        label = next((field for field in LABEL_FIELDS if field in first), "")
    if not label and not optional and text.label_field is None:
        raise InputError(f"{name}:1: no label field: it has {_names(first)}: give " + flags.LABEL_FIELD)
    ids = text.id_field if text.id_field in first else None
    said = f"text of {' and '.join(fields)}, " + (f"labels of {label}" if label else "no labels")
    said += f", ids of {ids}" if ids else ""
    return replace(text, text_fields=tuple(fields), label_field=label, id_field=ids), said


def _names(first: Mapping[str, Any]) -> str:
    """The fields of a record, the first of them, in a line."""
    names = list(map(shown_text, islice(first, _SHOWN_FIELDS)))
    return ", ".join(names) + (", ..." if len(first) > len(names) else "")


def kind_of_labels(text: TextOptions, first: Mapping[str, Any]) -> str:
    """What the labels of a record are: "names" or "ids", "" where it has none."""
    labels = LabelRows(text, ConvertOptions(), None, 0, "", {})
    try:
        labels.add(first, 1)
    except BadRowError:
        return ""
    return labels.kind
