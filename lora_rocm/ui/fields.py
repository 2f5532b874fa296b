"""Reads the fields that the page posts."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.datastructures import FormData
from starlette.requests import Request

from lora_rocm.errors import UserError

MAX_FIELDS = 10_000


async def fields_of(request: Request) -> FormData:
    """Return the posted fields. Without files they have at most ``security.MAX_BODY_BYTES``."""
    return await request.form(max_fields=MAX_FIELDS, max_files=MAX_FIELDS)


async def text_of(request: Request, field: str) -> str:
    """Return the text of a field that must be there.

    Raises:
        UserError: field-missing: the field is missing or empty.
    """
    value = (await fields_of(request)).get(field)
    if not isinstance(value, str) or not value.strip():
        raise UserError("field-missing", "This field is empty.", where=field, fix="Fill it in.")
    return value.strip()


def query_of(request: Request, name: str) -> str:
    """Return a value of the address that must be there.

    Raises:
        UserError: field-missing: it is missing.
    """
    value = request.query_params.get(name, "")
    if not value:
        raise UserError("field-missing", "This address is incomplete.", where=name, fix="Follow a link of the page.")
    return value


def number_of(given: Mapping[str, str], where: str) -> float:
    """Return the number in a field.

    Raises:
        UserError: number-wrong: it is not a finite number.
    """
    text = given.get(where, "").strip().replace(",", ".")
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not abs(value) < 1e15:
        what = "This is not a number."
        raise UserError("number-wrong", what, where=f"{where}: {text:.40}", fix="Write a number such as 1.")
    return value


def whole_number_of(given: Mapping[str, str], where: str) -> int:
    """Return the whole number in a field.

    Raises:
        UserError: number-wrong: it is not a whole number.
    """
    value = number_of(given, where)
    if value != int(value):
        fix = "Write a number such as 1."
        raise UserError("number-wrong", "This is not a whole number.", where=f"{where}: {value:g}", fix=fix)
    return int(value)
