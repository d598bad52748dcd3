//! Tests that the server and the client agree over a real socket, and that a hang-up ends the work.

#![expect(clippy::unwrap_used, reason = "a helper of a test fails like the test")]

mod fake;

use fake::FakeNode;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tidemark_api::client::{Client, ClientError};
use tidemark_api::server::{REQUESTS_MAX, ServeError, Server};
use tidemark_api::{
    CommitRequest, DoctorRequest, EventsRequest, ExportRequest, FlushRequest, GcRequest, ImportRequest,
    ListRequest, NodesRequest, PinRequest, PlacementRequest, REQUEST_BYTES_MAX, RecoverRequest,
    RemoveRequest, ShowRequest, StatusRequest, TiersRequest, UndeleteRequest, VerifyRequest, WhyRequest,
};
use tidemark_protocol::report::{ErrorCode, ExitCode};
use tidemark_protocol::selector::{Place, Selector};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::oneshot;

/// A free port on loopback.
const ANY_PORT: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

/// A fake node being served.
struct Served {
    node: Arc<FakeNode>,
    client: Client,
    http: SocketAddr,
    directory: tempfile::TempDir,
    stop: oneshot::Sender<()>,
    task: tokio::task::JoinHandle<()>,
}

async fn served(node: FakeNode) -> Served {
    let directory = tempfile::tempdir().unwrap();
    let node = Arc::new(node);
    let server = Server::bind(&directory.path().join("ckptd.sock"), ANY_PORT).await.unwrap();
    let http = server.http_addr();
    let (stop, stopped) = oneshot::channel::<()>();
    let shutdown = async move {
        let _ = stopped.await;
    };
    let task = tokio::spawn(server.run(node.clone(), shutdown));
    Served { node, client: Client::of_state_dir(directory.path()), http, directory, stop, task }
}

fn at(path: &str) -> Selector {
    Selector::At(Place::relative(path.as_bytes()).unwrap())
}

/// Waits for a condition that other tasks bring about.
async fn eventually(what: &str, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !condition() {
        assert!(Instant::now() < deadline, "{what} did not come true in 10 s");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Sends one plain HTTP request on TCP, and returns the whole answer.
async fn http(addr: SocketAddr, path: &str) -> String {
    let mut stream = tokio::net::TcpStream::connect(addr).await.unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nHost: n\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    answer
}

#[tokio::test]
async fn every_command_comes_back_as_it_was_answered() {
    let served = served(FakeNode::default()).await;
    let client = &served.client;
    assert_eq!(client.get(StatusRequest).await.unwrap().mount.path, fake::MOUNT);
    assert_eq!(client.get(TiersRequest).await.unwrap()[0].name, "tier1");
    assert_eq!(client.get(NodesRequest).await.unwrap()[0].name, "n0");
    assert_eq!(client.get(PlacementRequest).await.unwrap().nodes[0].partner.as_deref(), Some("n1"));
    assert_eq!(client.get(DoctorRequest).await.unwrap().exit_code(), ExitCode::Done);
    assert_eq!(client.ask(&ListRequest::default()).await.unwrap()[0], fake::checkpoint("run7/step-1200"));
    let show = client.ask(&ShowRequest { checkpoint: at("run7/x"), files: true }).await.unwrap();
    assert_eq!(show.files.unwrap()[0].path, "run7/x/a");
    let why = client.ask(&WhyRequest { place: Place::relative(b"run7/x").unwrap() }).await.unwrap();
    assert_eq!((why.path.as_str(), why.writers[0].process), ("run7/x", 7));
    let mut heard = 0;
    let request = VerifyRequest { checkpoint: Some(at("run7")), deep: true };
    assert!(client.work(&request, |_| heard += 1).await.unwrap().deep);
    assert_eq!(heard, 1, "the progress line comes before the result");
    let request = FlushRequest { wait: true, ..FlushRequest::default() };
    assert_eq!(client.work(&request, |_| ()).await.unwrap().committed.len(), 1);
    let commit = client.ask(&CommitRequest { place: Place::relative(b"run7/y").unwrap() }).await.unwrap();
    assert_eq!(commit.checkpoint.path, "run7/y");
    let request = PinRequest { checkpoint: at("run7/y"), pinned: true, by: "a test".into() };
    assert!(client.ask(&request).await.unwrap().pinned);
    let gc = client.work(&GcRequest { dry_run: true }, |_| ()).await.unwrap();
    assert_eq!((gc.exit_code(), gc.rows.len()), (ExitCode::Done, 1), "a dry run leaves nothing undone");
    let gc = client.work(&GcRequest { dry_run: false }, |_| ()).await.unwrap();
    assert_eq!(gc.exit_code(), ExitCode::Failed, "one is still there");
    let removal = client.work(&RemoveRequest { checkpoint: at("run7/y") }, |_| ()).await.unwrap();
    assert_eq!((removal.exit_code(), removal.versions), (ExitCode::Done, 2));
    let request = UndeleteRequest { checkpoint: at("run7/y") };
    assert_eq!(client.ask(&request).await.unwrap().files, 3);
    let version = Some("0.1".parse().unwrap());
    let request = ExportRequest { checkpoint: at("run7/y"), version, directory: "/tmp/out".into() };
    assert_eq!(client.work(&request, |_| ()).await.unwrap().directory, "/tmp/out");
    let request = ImportRequest { from: "old/run".into(), to: Some(Place::relative(b"run8").unwrap()) };
    let import = client.work(&request, |_| ()).await.unwrap();
    assert_eq!((import.exit_code(), import.loose), (ExitCode::Done, 2));
    let recovery = client.ask(&RecoverRequest::default()).await.unwrap();
    assert_eq!(recovery.exit_code(), ExitCode::NotRecoverable, "nothing is chosen");
    assert_eq!(client.metrics_text().await.unwrap(), "# EOF\n");
    assert_eq!(client.healthy().await.unwrap(), Ok(()));
}

#[tokio::test]
async fn a_path_that_is_not_utf8_reaches_the_node() {
    let served = served(FakeNode::default()).await;
    let place = Place::relative(b"run7/\xff\xfe").unwrap();
    let commit = served.client.ask(&CommitRequest { place }).await.unwrap();
    assert_eq!(commit.checkpoint.path, "run7/%FF%FE");
}

#[tokio::test]
async fn events_end_when_there_are_no_more_or_the_reader_has_enough() {
    let served = served(FakeNode::default()).await;
    let mut numbers = Vec::new();
    let since = EventsRequest { since: 1, follow: false };
    served
        .client
        .events(since, |event| {
            numbers.push(event.number);
            true
        })
        .await
        .unwrap();
    assert_eq!(numbers, [2, 3]);
    let mut first = None;
    let follow = EventsRequest { since: 0, follow: true };
    served
        .client
        .events(follow, |event| {
            first = Some(event.number);
            false
        })
        .await
        .unwrap();
    assert_eq!(first, Some(1));
}

#[tokio::test]
async fn a_hang_up_cancels_a_verify() {
    let served = served(FakeNode::default()).await;
    let client = served.client.clone();
    let verify = tokio::spawn(async move {
        client.work(&VerifyRequest { checkpoint: Some(at("endless")), deep: false }, |_| ()).await
    });
    eventually("the verify began", || served.node.verify_started.load(Ordering::SeqCst)).await;
    assert!(!served.node.verify_dropped.load(Ordering::SeqCst));
    verify.abort();
    eventually("the verify was dropped", || served.node.verify_dropped.load(Ordering::SeqCst)).await;
}

#[tokio::test]
async fn an_error_keeps_its_code_and_its_words() {
    let served = served(FakeNode::default()).await;
    let error = served.client.ask(&ShowRequest { checkpoint: at("absent"), files: false }).await.unwrap_err();
    let ClientError::Answer(refused) = &error else { panic!("{error}") };
    assert_eq!(refused.code, ErrorCode::NotFound);
    assert_eq!(refused.action, "`ckptctl ls` lists them");
    let request = VerifyRequest { checkpoint: Some(at("absent")), deep: false };
    let error = served.client.work(&request, |_| ()).await.unwrap_err();
    assert_eq!(error.exit_code(), ExitCode::NotFound, "an error at the end of a stream counts too");
}

#[tokio::test]
async fn no_daemon_says_what_to_do() {
    let directory = tempfile::tempdir().unwrap();
    let error = Client::of_state_dir(directory.path()).get(StatusRequest).await.unwrap_err();
    assert_eq!(error.exit_code(), ExitCode::Unavailable);
    assert!(error.is_away());
    let text = error.to_string();
    assert!(
        text.contains("ckptd.sock") && text.contains("ckptd up") && text.contains("--state-dir"),
        "{text}"
    );
}

#[tokio::test]
async fn a_stale_socket_is_replaced_and_a_live_one_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("state/ckptd.sock");
    std::fs::create_dir(socket.parent().unwrap()).unwrap();
    drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
    assert!(socket.exists(), "a listener that is gone leaves its file");
    let server = Server::bind(&socket, ANY_PORT).await.unwrap();
    let mode = std::fs::metadata(&socket).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let refused = Server::bind(&socket, ANY_PORT).await.unwrap_err();
    assert!(matches!(refused, ServeError::Live { .. }), "{refused}");
    assert!(refused.to_string().contains("--state-dir"), "{refused}");
    drop(server);
    assert!(Server::bind(&socket, ANY_PORT).await.is_ok());
}

#[tokio::test]
async fn a_socket_that_was_removed_is_made_again_and_another_daemon_s_is_left() {
    let served = served(FakeNode::default()).await;
    let socket = served.directory.path().join("ckptd.sock");
    std::fs::remove_file(&socket).unwrap();
    eventually("the socket is back", || socket.exists()).await;
    assert_eq!(served.client.get(StatusRequest).await.unwrap().mount.path, fake::MOUNT);
    std::fs::remove_file(&socket).unwrap();
    let other = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let inode = || std::os::unix::fs::MetadataExt::ino(&std::fs::metadata(&socket).unwrap());
    let theirs = inode();
    // Time for two checks.
    tokio::time::sleep(Duration::from_millis(2200)).await;
    assert_eq!(inode(), theirs);
    drop(other);
}

#[tokio::test]
async fn what_is_not_a_socket_is_never_removed() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("ckptd.sock");
    std::fs::write(&socket, "precious").unwrap();
    let refused = Server::bind(&socket, ANY_PORT).await.unwrap_err();
    assert!(matches!(refused, ServeError::NotASocket { .. }), "{refused}");
    assert_eq!(std::fs::read_to_string(&socket).unwrap(), "precious");
}

#[tokio::test]
async fn a_state_directory_that_is_made_is_closed_to_others() {
    let directory = tempfile::tempdir().unwrap();
    let state = directory.path().join("state");
    let _server = Server::bind(&state.join("ckptd.sock"), ANY_PORT).await.unwrap();
    assert_eq!(std::fs::metadata(&state).unwrap().permissions().mode() & 0o777, 0o700);
    assert_eq!(files_in(&state), ["ckptd.sock"]);
}

fn files_in(directory: &Path) -> Vec<String> {
    std::fs::read_dir(directory).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect()
}

#[tokio::test]
async fn a_socket_path_too_long_for_the_kernel_says_so() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("x".repeat(120)).join("ckptd.sock");
    let refused = Server::bind(&socket, ANY_PORT).await.unwrap_err();
    assert!(matches!(refused, ServeError::PathTooLong { max_bytes: 107, .. }), "{refused}");
}

#[tokio::test]
async fn tcp_gives_health_and_nothing_that_changes_anything() {
    let well = served(FakeNode::default()).await;
    assert!(http(well.http, "/healthz").await.starts_with("HTTP/1.1 200"));
    assert!(http(well.http, "/metrics").await.ends_with("# EOF\n"));
    assert!(http(well.http, "/status").await.contains(r#""state":"serving""#));
    for path in ["/v1/status", "/v1/doctor", "/v1/flush", "/v1/events"] {
        let answer = http(well.http, path).await;
        assert!(answer.starts_with("HTTP/1.1 404") && answer.contains("/healthz"), "{path}: {answer}");
    }
    let ill = served(FakeNode { degraded: true, ..FakeNode::default() }).await;
    let answer = http(ill.http, "/healthz").await;
    assert!(answer.starts_with("HTTP/1.1 503") && answer.contains("does not serve"), "{answer}");
}

/// Idle connections are descriptors that the daemon needs for files.
#[tokio::test]
async fn idle_connections_give_way_to_new_ones() {
    let served = served(FakeNode::default()).await;
    let mut idle = Vec::new();
    for _ in 0..200 {
        idle.push(tokio::net::TcpStream::connect(served.http).await.unwrap());
    }
    assert!(
        http(served.http, "/healthz").await.starts_with("HTTP/1.1 200"),
        "whoever comes later is answered"
    );
    let closed = async {
        for stream in &mut idle[..100] {
            assert_eq!(stream.read(&mut [0]).await.unwrap_or(0), 0);
        }
    };
    tokio::time::timeout(Duration::from_secs(5), closed).await.expect("the oldest were closed");
    let mut newest = idle.pop().unwrap();
    newest.write_all(b"GET /healthz HTTP/1.1\r\nHost: n\r\n\r\n").await.unwrap();
    let mut answer = [0; 12];
    newest.read_exact(&mut answer).await.unwrap();
    assert_eq!(&answer, b"HTTP/1.1 200", "one that is within the bound is kept");
}

#[tokio::test]
async fn a_request_beyond_the_bound_is_refused_unread() {
    let served = served(FakeNode::default()).await;
    let socket = served.directory.path().join("ckptd.sock");
    let mut stream = tokio::net::UnixStream::connect(&socket).await.unwrap();
    let length = REQUEST_BYTES_MAX + 1;
    let head =
        format!("POST /v1/list HTTP/1.1\r\nHost: n\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n");
    stream.write_all(head.as_bytes()).await.unwrap();
    // The server may answer and close before it has read this.
    let _ = stream.write_all(&vec![b' '; length]).await;
    let mut answer = vec![0; 16];
    stream.read_exact(&mut answer).await.unwrap();
    assert_eq!(&answer[..12], b"HTTP/1.1 413", "{}", String::from_utf8_lossy(&answer));
}

#[tokio::test]
async fn requests_beyond_the_bound_are_refused_and_served_again_later() {
    let served = served(FakeNode::default()).await;
    let follow = EventsRequest { since: 3, follow: true };
    let followers: Vec<_> = (0..REQUESTS_MAX)
        .map(|_| {
            let client = served.client.clone();
            tokio::spawn(async move { client.events(follow, |_| true).await })
        })
        .collect();
    let deadline = Instant::now() + Duration::from_secs(10);
    let refused = loop {
        assert!(Instant::now() < deadline, "never refused");
        match served.client.get(StatusRequest).await {
            Err(error) => break error,
            Ok(_) => tokio::time::sleep(Duration::from_millis(5)).await,
        }
    };
    assert_eq!(refused.exit_code(), ExitCode::Unavailable, "{refused}");
    for follower in followers {
        follower.abort();
    }
    while served.client.get(StatusRequest).await.is_err() {
        assert!(Instant::now() < deadline, "never served again");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn an_orderly_end_tells_streams_and_removes_the_socket() {
    let served = served(FakeNode::default()).await;
    let client = served.client.clone();
    let verify = tokio::spawn(async move {
        client.work(&VerifyRequest { checkpoint: Some(at("endless")), deep: false }, |_| ()).await
    });
    eventually("the verify began", || served.node.verify_started.load(Ordering::SeqCst)).await;
    served.stop.send(()).unwrap();
    let error = verify.await.unwrap().unwrap_err();
    assert!(
        matches!(&error, ClientError::Answer(refused) if refused.code == ErrorCode::Unavailable),
        "{error}"
    );
    tokio::time::timeout(Duration::from_secs(4), served.task).await.unwrap().unwrap();
    assert_eq!(files_in(served.directory.path()), [""; 0]);
}
