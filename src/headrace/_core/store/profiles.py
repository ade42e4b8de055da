"""Credentials of AWS profiles, which boto3 reads (``~/.aws``, SSO, roles) and obstore does not."""

from __future__ import annotations

import os
from collections.abc import Mapping

from headrace._core.store.schemes import traits_of
from headrace._core.store.store_options import is_on, option
from headrace.errors import MissingExtraError

PROFILE = "profile"
"""The name of headrace's own option among those of a store."""


def profile_of(url: str, options: Mapping[str, object]) -> str | None:
    """The name of the AWS profile that a store's credentials come from; None where they come from elsewhere.

    The option ``profile`` names one; else ``AWS_PROFILE`` does, where neither the options nor the environment has other
    credentials, as with the AWS command line.

    Raises:
        ValueError: the option is given for a store that is not S3, or beside other credentials.
    """
    traits = traits_of(url)
    given = options.get(PROFILE)
    if given is None:
        others = any(is_on(option(url, options, name)) for name in traits.credential_options)
        return os.environ.get("AWS_PROFILE") or None if traits.aws_profiles and not others else None
    if not traits.aws_profiles:
        raise ValueError(f"{PROFILE}={given!r} names an AWS profile, for s3:// URLs only")
    beside = [name for name in options if str(name).lower().removeprefix("aws_") in traits.credential_options]
    if beside:
        raise ValueError(
            f"{PROFILE}={given!r} and {beside[0]} both say which credentials are used. Give one of the two"
        )
    return str(given)


def profile_provider(profile: str) -> object:
    """An obstore credential provider for a profile. It reads the profile when it is constructed.

    Raises:
        MissingExtraError: boto3 is not installed.
        ValueError: there is no such profile, or it has no credentials.
    """
    try:
        import boto3.session
        import botocore.exceptions
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError as error:
        what = f"reading the AWS profile {profile!r} (AWS_PROFILE, or the option profile=)"
        raise MissingExtraError(what=what, package=error.name or "boto3", extra="aws") from None
    try:
        session = boto3.session.Session(profile_name=profile)
        if session.get_credentials() is None:
            raise ValueError(f"the AWS profile {profile!r} has no credentials")
        return Boto3CredentialProvider(session)
    except botocore.exceptions.BotoCoreError as error:
        raise ValueError(f"the AWS profile {profile!r} cannot be used: {error}") from None


def has_unused_profiles(url: str) -> bool:
    """Whether this user has AWS profiles and none was selected."""
    if not traits_of(url).aws_profiles or os.environ.get("AWS_PROFILE"):
        return False
    files = {"AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials", "AWS_CONFIG_FILE": "~/.aws/config"}
    return any(os.path.exists(os.environ.get(name) or os.path.expanduser(path)) for name, path in files.items())
