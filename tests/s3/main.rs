//! Ambiguous answers of real object stores: is a doubtful one ever taken for a decision?
//!
//! Owns: every scripted fault of the S3 server against every kind of request and against whole saves, and the behaviour of
//! independent servers. Does not own: the plain contract (suite conformance).

mod cells;
mod doubt;
mod encoded;
mod matrix;
mod others;
mod refusal;
mod save;
mod scene;
mod secrets;
mod unfinished;

use std::sync::Arc;
use std::time::Duration;
use tidemark_store::{RetryPolicy, Store, StoreSettings, open_with};
use tidemark_tests::s3::{Fault, FaultEffect, S3Operation, S3Options, S3Server};

/// Returns settings with times short enough for a test, and long enough for a loaded machine.
fn settings(server: &S3Server) -> StoreSettings {
    settings_of(server.env())
}

fn settings_of(variables: Vec<(String, String)>) -> StoreSettings {
    StoreSettings {
        request_timeout: Duration::from_millis(700),
        connect_timeout: Duration::from_millis(700),
        retry: RetryPolicy {
            attempts: 3,
            first_pause: Duration::from_millis(5),
            longest_pause: Duration::from_millis(20),
        },
        least_part_bytes: 1,
        variables: Some(variables),
        ..StoreSettings::default()
    }
}

async fn start(options: S3Options) -> (S3Server, Arc<dyn Store>) {
    let server = S3Server::start(options).expect("server");
    let store = open_with(&server.url("p"), &settings(&server)).await.expect("open");
    (server, store)
}

fn fault(operation: S3Operation, nth: Option<u64>, effect: FaultEffect) -> Fault {
    Fault { operation, key_contains: String::new(), nth, effect }
}
