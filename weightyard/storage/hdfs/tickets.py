"""Kerberos: the ticket of whoever runs this, and logging in to WebHDFS with it.

Uses GSSAPI itself, in a few lines: `requests-kerberos` shares the state of a log-in among threads,
so that most of several at once fail, and does not say why one failed.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

from requests import PreparedRequest, Response
from requests.auth import AuthBase

from weightyard.errors import BadSetting, NotAllowed
from weightyard.storage.watched import Watched


@dataclass(frozen=True, slots=True)
class Ticket:
    """A ticket that a KDC has given to someone, to show to servers."""

    principal: str
    left_s: int
    """How long it lasts."""

    @classmethod
    def own(cls, limit_s: float) -> Ticket:
        """The ticket of whoever runs this; with a keytab, the KDC may be asked for it now.

        Raises NotAllowed, BadSetting, and StoreUnavailable if the KDC says nothing.
        """
        gssapi = _gssapi()

        def find() -> Ticket:
            with _explained("", "do KRB5_CONFIG and KRB5_CLIENT_KTNAME fit?"):
                found = gssapi.Credentials(usage="initiate")
                return cls(str(found.name), int(found.lifetime or 0))

        with closing(Watched(most=1)) as watched:
            return watched.call("asking for a Kerberos ticket", limit_s, find)


class TicketAuth(AuthBase):
    """Shows a server that asks for it a ticket (SPNEGO, RFC 4559). Any number of threads may.

    Raises BadSetting where GSSAPI is missing; requests raise NotAllowed without a ticket.
    """

    def __init__(self) -> None:
        self._gssapi = _gssapi()

    def __call__(self, request: PreparedRequest) -> PreparedRequest:
        request.register_hook("response", self._log_in)
        return request

    def _log_in(self, answer: Response, **options: Any) -> Response:
        asked = answer.headers.get("WWW-Authenticate", "").lower().startswith("negotiate")
        if answer.status_code != HTTPStatus.UNAUTHORIZED or not asked:
            return answer
        answer.close()  # unread: however long it is, it says nothing more
        again = answer.request.copy()
        host = str(urlsplit(again.url).hostname)
        again.headers["Authorization"] = f"Negotiate {self._token_for(host)}"
        found: Response = answer.connection.send(again, **options)
        found.history.append(answer)
        found.request = again
        return found

    def _token_for(self, host: str) -> str:
        gssapi = self._gssapi
        advice = f"HTTP/{host} needs a key, and to be asked by that name: see WEIGHTYARD_WEBHDFS"
        with _explained(f" for {host}", advice):
            context = gssapi.SecurityContext(
                name=gssapi.Name(f"HTTP@{host}", gssapi.NameType.hostbased_service),
                mech=gssapi.MechType.kerberos,
                usage="initiate",
            )
            return b64encode(context.step()).decode()


@contextmanager
def _explained(what_for: str, advice: str) -> Iterator[None]:
    """Turns GSSAPI's errors into NotAllowed, with what to do about them."""
    errors = _gssapi().exceptions
    try:
        yield
    except errors.GSSError as why:
        # GSSAPI's own words are the same for nearly everything.
        said = why.get_all_statuses(why.min_code, False) if why.min_code else [str(why)]
        if isinstance(why, (errors.MissingCredentialsError, errors.ExpiredCredentialsError)):
            advice = "`kinit`, or name a keytab in KRB5_CLIENT_KTNAME"
        raise NotAllowed(f"no Kerberos ticket{what_for}: {', '.join(said)}; {advice}") from None


def _gssapi() -> Any:
    """The package, which has no types. Raises BadSetting."""
    try:
        import gssapi
    except ImportError:
        raise BadSetting(
            "this cluster uses Kerberos: install weightyard[kerberos], for which a C compiler and "
            "the headers of Python and of MIT's Kerberos (libkrb5-dev or krb5-devel) are needed"
        ) from None
    return gssapi
