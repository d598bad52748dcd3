//! Configuration of a client for Google or Azure from a `gs://` or `az://` URL and the usual environment.
//!
//! Owns: which variables count, the texts for refusals. Does not own: requests, their repetition and the result of a doubtful
//! create, which are the same as for S3 (`mod`). Both stores accept a condition with a create (`x-goog-if-generation-match: 0`,
//! `If-None-Match: *`), and the probe finds out whether they keep it.

use super::wire::Connector;
use super::{Client, Target, config};
use crate::{StoreError, StoreSettings, without_secrets};
use object_store::ClientOptions;
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use std::collections::BTreeMap;
use std::sync::Arc;
use url::Url;

const GOOGLE_REFUSED: &str = "check GOOGLE_APPLICATION_CREDENTIALS or GOOGLE_SERVICE_ACCOUNT (or the role), the clock, and that \
                              they may list the bucket and get, create and delete objects below the prefix";
const AZURE_REFUSED: &str = "check AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, a SAS token or the role, the clock, and \
                             that they may list the container and read, write and delete blobs below the prefix";

/// Reads the environment and builds the client, without contacting the network.
pub(super) fn target(url: &Url, settings: &StoreSettings) -> Result<Target, StoreError> {
    let refuse = |reason: String| StoreError::Url { url: without_secrets(url.as_str()), reason };
    let scheme = url.scheme();
    let bucket = url.host_str().filter(|host| !host.is_empty());
    let bucket = bucket.ok_or_else(|| {
        let what = if scheme == "az" {
            "container; write az://container/prefix"
        } else {
            "bucket; write gs://bucket/prefix"
        };
        refuse(format!("it names no {what}"))
    })?;
    if url.query().is_some() || url.fragment().is_some() {
        return Err(refuse("it has a query or fragment; settings come from the environment".to_owned()));
    }
    let path = url.path().trim_matches('/');
    let prefix = if path.is_empty() { String::new() } else { format!("{path}/") };
    let variables = config::variables(settings);
    let (client, endpoint): (Arc<dyn Client>, _) = match scheme {
        "az" => azure(bucket, &variables, settings).map_err(refuse)?,
        _ => google(bucket, &variables, settings).map_err(refuse)?,
    };
    let at = endpoint.map_or_else(String::new, |endpoint| format!(" at {}", without_secrets(&endpoint)));
    Ok(Target {
        client,
        aws: None,
        lists_exact: scheme != "az",
        refused: if scheme == "az" { AZURE_REFUSED } else { GOOGLE_REFUSED },
        description: format!("{scheme}://{bucket}/{path}{at}"),
        prefix,
    })
}

fn google(
    bucket: &str,
    variables: &BTreeMap<String, String>,
    settings: &StoreSettings,
) -> Result<(Arc<dyn Client>, Option<String>), String> {
    let mut builder = GoogleCloudStorageBuilder::new();
    for (name, value) in variables.iter().filter(|(name, _)| name.starts_with("GOOGLE_")) {
        match name.to_ascii_lowercase().parse::<GoogleConfigKey>() {
            // Many GOOGLE_ variables are not about storage, and the connection settings follow below.
            Ok(GoogleConfigKey::Client(_) | GoogleConfigKey::Bucket) | Err(_) => {}
            Ok(key) => builder = builder.with_config(key, value),
        }
    }
    let endpoint = builder.get_config_value(&GoogleConfigKey::BaseUrl);
    let client = builder
        .with_bucket_name(bucket)
        .with_client_options(options(endpoint.as_deref(), settings))
        .with_retry(config::no_repetition())
        .with_http_connector(Connector { damage_parts: false })
        .build()
        .map_err(|error| error.to_string())?;
    Ok((Arc::new(client), endpoint))
}

fn azure(
    container: &str,
    variables: &BTreeMap<String, String>,
    settings: &StoreSettings,
) -> Result<(Arc<dyn Client>, Option<String>), String> {
    let mut builder = MicrosoftAzureBuilder::new();
    for (name, value) in variables.iter().filter(|(name, _)| name.starts_with("AZURE_")) {
        match name.to_ascii_lowercase().parse::<AzureConfigKey>() {
            Ok(AzureConfigKey::Client(_) | AzureConfigKey::ContainerName) | Err(_) => {}
            Ok(key) => builder = builder.with_config(key, value),
        }
    }
    // The platform's variable for a managed identity has no prefix.
    if let Some(identity) = variables.get("IDENTITY_ENDPOINT") {
        builder = builder.with_msi_endpoint(identity);
    }
    let endpoint = builder.get_config_value(&AzureConfigKey::Endpoint);
    let client = builder
        .with_container_name(container)
        .with_client_options(options(endpoint.as_deref(), settings))
        .with_retry(config::no_repetition())
        .with_http_connector(Connector { damage_parts: false })
        .build()
        .map_err(|error| error.to_string())?;
    Ok((Arc::new(client), endpoint))
}

fn options(endpoint: Option<&str>, settings: &StoreSettings) -> ClientOptions {
    let plain_http = endpoint.is_some_and(|endpoint| endpoint.starts_with("http://"));
    config::bounded(ClientOptions::new(), plain_http, settings)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(url: &str, variables: &[(&str, &str)]) -> Result<Target, StoreError> {
        let variables = variables.iter().map(|(a, b)| ((*a).to_owned(), (*b).to_owned())).collect();
        let settings = StoreSettings { variables: Some(variables), ..StoreSettings::default() };
        target(&Url::parse(url).expect("URL"), &settings)
    }

    #[test]
    fn a_url_names_the_bucket_and_the_prefix_and_the_environment_says_who_asks() {
        let google = open("gs://bucket/some/prefix/", &[("GOOGLE_SKIP_SIGNATURE", "true")]).expect("target");
        assert_eq!(
            (google.description.as_str(), google.prefix.as_str()),
            ("gs://bucket/some/prefix", "some/prefix/")
        );
        let key = [
            ("AZURE_STORAGE_ACCOUNT_NAME", "account"),
            ("AZURE_STORAGE_ACCOUNT_KEY", "aHVudGVyMg=="),
            ("AZURE_STORAGE_ENDPOINT", "http://127.0.0.1:10000/account"),
        ];
        let azure = open("az://container", &key).expect("target");
        assert_eq!(azure.description, "az://container/ at http://127.0.0.1:10000/account");
        assert_eq!(azure.prefix, "");
        assert!(!format!("{:?}", azure.client).contains("aHVudGVyMg"), "{:?}", azure.client);
    }

    #[test]
    fn what_cannot_be_opened_is_refused_without_repeating_a_secret() {
        for (url, variables) in [
            ("gs://", &[][..]),
            ("az://", &[]),
            ("gs://bucket?key=value", &[]),
            // There is no account, so the owner of the container is unknown.
            ("az://container/x", &[]),
            ("gs://bucket/x", &[("GOOGLE_SERVICE_ACCOUNT_KEY", "hunter2")]),
        ] {
            let Err(error) = open(url, variables) else { panic!("{url} was taken") };
            let text = error.to_string();
            assert!(matches!(error, StoreError::Url { .. }) && !text.contains("hunter2"), "{url}: {text}");
        }
    }
}
