"""OAuth for servers that want it, without an interactive login: client credentials, or a refresh token got once."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import httpx2
from mcp.client.auth import OAuthClientProvider
from mcp.client.auth.extensions.client_credentials import ClientCredentialsOAuthProvider
from mcp.shared.auth import OAuthClientInformationFull, OAuthToken

from vllm_gptoss.tools.mcp.settings import OAuthConfig, expand

logger = logging.getLogger(__name__)


class Tokens:
    """Tokens of one server, for all its connections and as long as the process lives."""

    def __init__(self) -> None:
        self._tokens: OAuthToken | None = None
        self._client: OAuthClientInformationFull | None = None
        self._told = False

    async def get_tokens(self) -> OAuthToken | None:
        return self._tokens

    async def set_tokens(self, tokens: OAuthToken) -> None:
        if self._tokens and not tokens.refresh_token:
            tokens = tokens.model_copy(update={"refresh_token": self._tokens.refresh_token})
        self._tokens = tokens

    def refresh_token(self, first: str, variable: str) -> str:
        """The newest refresh token: the last one from the server, else `first`, the value of $`variable`."""
        newest = (self._tokens and self._tokens.refresh_token) or first
        if newest != first and not self._told:
            self._told = True
            logger.warning(
                "mcp: the refresh token in $%s was replaced by its server; a restart needs a new one", variable
            )
        return newest

    async def get_client_info(self) -> OAuthClientInformationFull | None:
        return self._client

    async def set_client_info(self, client_info: OAuthClientInformationFull) -> None:
        self._client = client_info


class RefreshTokenProvider(ClientCredentialsOAuthProvider):
    """Gets access tokens with a refresh token, from the issuer that the operator named, and from no other."""

    def __init__(self, url: str, tokens: Tokens, config: OAuthConfig, environ: Mapping[str, str]) -> None:
        secret = environ[config.client_secret_env] if config.client_secret_env else ""
        method: Any = "client_secret_basic" if secret else "none"
        client = environ[config.client_id_env]
        super().__init__(url, tokens, client, secret, method, config.scope, config.issuer)
        self._tokens = tokens
        self._variable, self._first = config.refresh_token_env, environ[config.refresh_token_env]

    async def _perform_authorization(self) -> httpx2.Request:
        # Raises for another issuer's metadata.
        judged: httpx2.Request = await super()._perform_authorization()  # type: ignore[no-untyped-call]
        assert self.context.client_info is not None
        data = {
            "grant_type": "refresh_token",
            "refresh_token": self._tokens.refresh_token(self._first, self._variable),
            "client_id": str(self.context.client_info.client_id),
        }
        if self.context.should_include_resource_param(self.context.protocol_version):
            data["resource"] = self.context.get_resource_url()
        data, headers = self.context.prepare_token_auth(data, {"Content-Type": "application/x-www-form-urlencoded"})
        return httpx2.Request("POST", judged.url, data=data, headers=headers)


def authentication(url: str, config: OAuthConfig, environ: Mapping[str, str], tokens: Tokens) -> OAuthClientProvider:
    """The OAuth provider that handles a server's 401 for the client of `url`. Raises MissingVariableError: the
    configuration names a variable that is not set."""
    names = [name for name in (config.client_id_env, config.client_secret_env, config.refresh_token_env) if name]
    clean = {name: expand(f"${{{name}}}", environ).strip() for name in names}
    if config.refresh_token_env:
        return RefreshTokenProvider(url, tokens, config, clean)
    return ClientCredentialsOAuthProvider(
        url,
        tokens,
        clean[config.client_id_env],
        clean[config.client_secret_env],
        scope=config.scope,
        issuer=config.issuer,
    )
