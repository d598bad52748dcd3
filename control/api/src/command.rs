//! Each command once: its path, what is asked, and what is answered.
//!
//! Owns: which command has which path, request, answer and method of the node. The client and the routes follow from that. Does not own: what
//! the requests say and the methods do (the crate's root), the answers (`protocol::report`).

use crate::{
    CommitRequest, DoctorRequest, ExportRequest, FlushRequest, GcRequest, ImportRequest, ListRequest,
    NodeApi, NodesRequest, PinRequest, PlacementRequest, PrefetchRequest, ProgressSink, RecoverRequest,
    RemoveRequest, ShowRequest, StatusRequest, TiersRequest, UndeleteRequest, VerifyRequest, WhyRequest,
};
use serde::{Serialize, de::DeserializeOwned};
use tidemark_protocol::report::{
    ApiError, Checkpoint, Commit, Doctor, Export, Flush, Gc, Import, Node, Pin, Placement, Prefetch,
    Recovery, Removal, Show, Status, TierStatus, Undelete, Verify, Why,
};

/// A command. The value is the request.
pub trait Command: Send + Sync + 'static {
    const PATH: &'static str;
    type Answer: Serialize + DeserializeOwned + Send + 'static;
}

/// A command without arguments: GET.
pub trait Get: Command {
    /// Has the node answer.
    fn answer(node: &dyn NodeApi) -> impl Future<Output = Result<Self::Answer, ApiError>> + Send;
}

/// A command that is answered in one piece: POST.
pub trait Ask: Command + Serialize + DeserializeOwned {
    /// Has the node answer.
    fn answer(self, node: &dyn NodeApi) -> impl Future<Output = Result<Self::Answer, ApiError>> + Send;
}

/// A command that may take long, and tells its progress: POST, answered by lines.
pub trait Work: Command + Serialize + DeserializeOwned {
    /// Has the node do the work. The node's method says what dropping the future ends.
    fn answer(
        self,
        node: &dyn NodeApi,
        progress: ProgressSink,
    ) -> impl Future<Output = Result<Self::Answer, ApiError>> + Send;
}

/// A visitor of the list of commands, with a method for each kind.
pub(crate) trait Visit: Sized {
    fn get<C: Get>(self) -> Self;
    fn ask<C: Ask>(self) -> Self;
    fn work<C: Work>(self) -> Self;
}

macro_rules! commands {
    ($($path:literal $request:ident => $answer:ty, $kind:ident by $method:ident;)*) => {
        $(
            impl Command for $request {
                const PATH: &'static str = $path;
                type Answer = $answer;
            }
            commands!(@$kind $request, $method);
        )*

        /// Visits every command.
        pub(crate) fn each<V: Visit>(visitor: V) -> V {
            visitor$(.$kind::<$request>())*
        }
    };
    (@get $request:ident, $method:ident) => {
        impl Get for $request {
            async fn answer(node: &dyn NodeApi) -> Result<Self::Answer, ApiError> {
                node.$method().await
            }
        }
    };
    (@ask $request:ident, $method:ident) => {
        impl Ask for $request {
            async fn answer(self, node: &dyn NodeApi) -> Result<Self::Answer, ApiError> {
                node.$method(self).await
            }
        }
    };
    (@work $request:ident, $method:ident) => {
        impl Work for $request {
            async fn answer(self, node: &dyn NodeApi, progress: ProgressSink) -> Result<Self::Answer, ApiError> {
                node.$method(self, progress).await
            }
        }
    };
}

commands! {
    "/v1/status" StatusRequest => Status, get by status;
    "/v1/tiers" TiersRequest => Vec<TierStatus>, get by tiers;
    "/v1/nodes" NodesRequest => Vec<Node>, get by nodes;
    "/v1/placement" PlacementRequest => Placement, get by placement;
    "/v1/doctor" DoctorRequest => Doctor, get by doctor;
    "/v1/list" ListRequest => Vec<Checkpoint>, ask by list;
    "/v1/show" ShowRequest => Show, ask by show;
    "/v1/why" WhyRequest => Why, ask by why;
    "/v1/commit" CommitRequest => Commit, ask by commit;
    "/v1/pin" PinRequest => Pin, ask by pin;
    "/v1/undelete" UndeleteRequest => Undelete, ask by undelete;
    "/v1/recover" RecoverRequest => Recovery, ask by recover;
    "/v1/gc" GcRequest => Gc, work by gc;
    "/v1/remove" RemoveRequest => Removal, work by remove;
    "/v1/export" ExportRequest => Export, work by export;
    "/v1/import" ImportRequest => Import, work by import;
    "/v1/verify" VerifyRequest => Verify, work by verify;
    "/v1/prefetch" PrefetchRequest => Prefetch, work by prefetch;
    "/v1/flush" FlushRequest => Flush, work by flush;
}
