//! Configuration of an S3 client from a URL and the usual environment.
//!
//! Owns: which variables count, the shared credentials file, the defaults. Does not own: instance, container and
//! web-identity credentials, which `object_store` fetches and renews.

use super::wire::Connector;
use super::{Aws, Client, Target};
use crate::{StoreError, StoreSettings, without_secrets};
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey, Checksum};
use object_store::client::HttpConnector;
use object_store::{BackoffConfig, ClientOptions, HeaderMap, HeaderValue, RetryConfig};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use url::Url;

const DEFAULT_REGION: &str = "us-east-1";

/// Largest credentials file, in bytes. Such a file has a few profiles; a larger file is something else.
const CREDENTIALS_FILE_BYTES: u64 = 1 << 20;

const REFUSED: &str = "check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN (or the role), the clock, and that \
                       they may list the bucket and get, put and delete objects below the prefix";

/// Reads the environment and builds the client, without contacting the network.
pub(super) fn target(url: &Url, settings: &StoreSettings) -> Result<Target, StoreError> {
    let refuse = |reason: String| StoreError::Url { url: without_secrets(url.as_str()), reason };
    let bucket = url.host_str().filter(|host| !host.is_empty());
    let bucket = bucket.ok_or_else(|| refuse("it names no bucket; write s3://bucket/prefix".to_owned()))?;
    if url.query().is_some() || url.fragment().is_some() {
        return Err(refuse("it has a query or fragment; settings come from the environment".to_owned()));
    }
    let path = url.path().trim_matches('/');
    let prefix = if path.is_empty() { String::new() } else { format!("{path}/") };

    let mut variables = variables(settings);
    add_file_credentials(&mut variables);
    let endpoint = ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"]
        .into_iter()
        .find_map(|name| variables.get(name))
        .cloned();
    let plain_http = endpoint.as_ref().is_some_and(|endpoint| endpoint.starts_with("http://"));
    if let Some(endpoint) = &endpoint {
        let parsed = Url::parse(endpoint).map_err(|error| {
            refuse(format!("AWS_ENDPOINT_URL {:?} is not a URL: {error}", without_secrets(endpoint)))
        })?;
        if !matches!(parsed.scheme(), "http" | "https") || parsed.host_str().is_none() {
            return Err(refuse("AWS_ENDPOINT_URL must be http://host:port or https://host".to_owned()));
        }
        if !parsed.username().is_empty() || parsed.password().is_some() {
            return Err(refuse(
                "AWS_ENDPOINT_URL holds a user or password; use AWS_ACCESS_KEY_ID".to_owned(),
            ));
        }
    }

    let build = |damage_parts| {
        builder(&variables, endpoint.as_deref(), plain_http, settings)
            .with_bucket_name(bucket)
            .with_http_connector(Connector { damage_parts })
            .build()
            .map_err(|error| refuse(error.to_string()))
    };
    let at = endpoint.as_ref().map_or_else(String::new, |endpoint| format!(" at {endpoint}"));
    let client = Arc::new(build(false)?);
    let plain = Connector { damage_parts: false }
        .connect(&client_options(&variables, plain_http, settings))
        .map_err(|error| refuse(error.to_string()))?;
    Ok(Target {
        client: Arc::clone(&client) as Arc<dyn Client>,
        aws: Some(Aws { client, damaging: build(true)?, plain }),
        refused: REFUSED,
        lists_exact: true,
        description: format!("s3://{bucket}/{path}{at}"),
        prefix,
    })
}

fn builder(
    variables: &BTreeMap<String, String>,
    endpoint: Option<&str>,
    plain_http: bool,
    settings: &StoreSettings,
) -> AmazonS3Builder {
    let mut builder = AmazonS3Builder::new();
    // Asks for the stored checksum with each read. A default header, because it must be part of the signature.
    let mut headers = HeaderMap::new();
    headers.insert("x-amz-checksum-mode", HeaderValue::from_static("ENABLED"));
    let options = client_options(variables, plain_http, settings).with_default_headers(headers);
    for (name, value) in variables.iter().filter(|(name, _)| name.starts_with("AWS_")) {
        match name.to_ascii_lowercase().parse::<AmazonS3ConfigKey>() {
            // Many AWS_ variables are not about S3 at all.
            Ok(AmazonS3ConfigKey::Client(_)) | Err(_) => {}
            Ok(key) => builder = builder.with_config(key, value),
        }
    }
    if builder.get_config_value(&AmazonS3ConfigKey::Region).is_none()
        && builder.get_config_value(&AmazonS3ConfigKey::DefaultRegion).is_none()
    {
        builder = builder.with_region(DEFAULT_REGION);
    }
    if builder.get_config_value(&AmazonS3ConfigKey::Checksum).is_none() {
        builder = builder.with_checksum_algorithm(Checksum::CRC64NVME);
    }
    if !variables.contains_key("AWS_UNSIGNED_PAYLOAD") {
        // TLS protects the body already, and SHA-256 is the slowest step of an upload. Over plain HTTP the body is
        // signed.
        builder = builder.with_unsigned_payload(!plain_http);
    }
    if let Some(endpoint) = endpoint {
        builder = builder.with_endpoint(endpoint);
    }
    builder
        .with_client_options(options)
        .with_retry(no_repetition())
        // Plain DELETE is idempotent and known to every store; the bulk call is not.
        .with_disable_bulk_delete(true)
}

/// Returns a configuration without repetition: a conditional create repeated inside the client would turn its own
/// success into "already exists".
pub(super) fn no_repetition() -> RetryConfig {
    RetryConfig { max_retries: 0, retry_timeout: Duration::ZERO, backoff: BackoffConfig::default() }
}

/// Returns the options for connections, which are the same for every client.
fn client_options(
    variables: &BTreeMap<String, String>,
    plain_http: bool,
    settings: &StoreSettings,
) -> ClientOptions {
    let mut options = ClientOptions::new();
    for (name, value) in variables.iter().filter(|(name, _)| name.starts_with("AWS_")) {
        if let Ok(AmazonS3ConfigKey::Client(key)) = name.to_ascii_lowercase().parse() {
            options = options.with_config(key, value);
        }
    }
    bounded(options, plain_http, settings)
}

/// Disables the client's own time limit, which would cut large parts: time is bounded around each request, by its
/// size.
pub(super) fn bounded(options: ClientOptions, plain_http: bool, settings: &StoreSettings) -> ClientOptions {
    options.with_timeout_disabled().with_connect_timeout(settings.connect_timeout).with_allow_http(plain_http)
}

/// Returns the non-empty variables by name.
pub(super) fn variables(settings: &StoreSettings) -> BTreeMap<String, String> {
    let all: BTreeMap<String, String> = match &settings.variables {
        Some(given) => given.iter().cloned().collect(),
        None => std::env::vars_os()
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
            .collect(),
    };
    all.into_iter().filter(|(_, value)| !value.is_empty()).collect()
}

/// Adds the keys of the shared credentials file if no other source of credentials is named.
fn add_file_credentials(variables: &mut BTreeMap<String, String>) {
    const OTHERS: [&str; 5] = [
        "AWS_ACCESS_KEY_ID",
        "AWS_WEB_IDENTITY_TOKEN_FILE",
        "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
        "AWS_CONTAINER_CREDENTIALS_FULL_URI",
        "AWS_SKIP_SIGNATURE",
    ];
    if OTHERS.iter().any(|name| variables.contains_key(*name)) {
        return;
    }
    let file = variables.get("AWS_SHARED_CREDENTIALS_FILE").map(PathBuf::from);
    let home = || variables.get("HOME").map(|home| PathBuf::from(home).join(".aws/credentials"));
    let Some(path) = file.or_else(home) else { return };
    if std::fs::metadata(&path).map_or(true, |meta| !meta.is_file() || meta.len() > CREDENTIALS_FILE_BYTES) {
        return;
    }
    let Ok(text) = std::fs::read_to_string(&path) else { return };
    let profile = variables.get("AWS_PROFILE").map_or("default", String::as_str);
    let found = profile_keys(&text, profile);
    variables.extend(found);
}

fn profile_keys(text: &str, profile: &str) -> Vec<(String, String)> {
    const KEYS: [&str; 3] = ["aws_access_key_id", "aws_secret_access_key", "aws_session_token"];
    let mut inside = false;
    let mut found = Vec::new();
    for line in text.lines().map(str::trim) {
        if let Some(name) = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            inside = name.trim() == profile;
        } else if inside
            && let Some((name, value)) = line.split_once('=')
            && KEYS.contains(&name.trim())
        {
            found.push((name.trim().to_ascii_uppercase(), value.trim().to_owned()));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(variables: &[(&str, &str)]) -> StoreSettings {
        let variables = variables.iter().map(|(a, b)| ((*a).to_owned(), (*b).to_owned())).collect();
        StoreSettings { variables: Some(variables), ..StoreSettings::default() }
    }

    fn open(url: &str, variables: &[(&str, &str)]) -> Result<Target, StoreError> {
        target(&Url::parse(url).expect("URL"), &settings(variables))
    }

    #[test]
    fn the_description_names_bucket_prefix_and_endpoint_and_no_secret() {
        let keys = [
            ("AWS_ACCESS_KEY_ID", "AKIAEXAMPLE"),
            ("AWS_SECRET_ACCESS_KEY", "hunter2"),
            ("AWS_ENDPOINT_URL", "http://127.0.0.1:9000"),
        ];
        let target = open("s3://bucket/some/prefix/", &keys).expect("target");
        assert_eq!(target.description, "s3://bucket/some/prefix at http://127.0.0.1:9000");
        assert_eq!(target.prefix, "some/prefix/");
        assert!(!format!("{:?}", target.client).contains("hunter2"));
    }

    #[test]
    fn an_endpoint_that_is_no_endpoint_is_refused_without_repeating_its_secret() {
        for endpoint in ["nonsense", "ftp://host", "http://user:hunter2@host"] {
            let Err(error) = open("s3://bucket", &[("AWS_ENDPOINT_URL", endpoint)]) else {
                panic!("{endpoint} was taken");
            };
            assert!(!error.to_string().contains("hunter2"), "{error}");
        }
    }

    #[test]
    fn keys_come_from_the_named_profile_only() {
        let text =
            "[default]\naws_access_key_id = A\n[other]\naws_access_key_id=B\naws_secret_access_key = C=\n";
        assert_eq!(profile_keys(text, "default"), vec![("AWS_ACCESS_KEY_ID".to_owned(), "A".to_owned())]);
        assert_eq!(profile_keys(text, "other").last().expect("secret").1, "C=");
        assert!(profile_keys(text, "absent").is_empty());
    }
}
