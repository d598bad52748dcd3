//! A link whose calls name their kind, so that one service can sort them.
//!
//! Owns: the first byte. Does not own: the link, the calls' content.

use async_trait::async_trait;
use bytes::Bytes;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;
use tidemark_transport::{Address, BytesSink, BytesSource, Grant, Link, LinkError, Pace, Token};

/// See the module's head.
#[derive(Debug)]
pub struct Tagged {
    link: Arc<dyn Link>,
    tag: u8,
}

impl Tagged {
    /// Makes a link for calls about copies.
    #[must_use]
    pub fn replication(link: Arc<dyn Link>) -> Arc<dyn Link> {
        Arc::new(Self { link, tag: super::tag::REPLICATION })
    }

    fn body(&self, body: &Bytes) -> Bytes {
        [&[self.tag], body.as_ref()].concat().into()
    }
}

#[async_trait]
impl Link for Tagged {
    async fn call(&self, to: &Address, body: Bytes, deadline: Duration) -> Result<Bytes, LinkError> {
        self.link.call(to, self.body(&body), deadline).await
    }

    async fn tell(&self, to: &Address, body: Bytes) -> Result<(), LinkError> {
        self.link.tell(to, self.body(&body)).await
    }

    fn grant(&self, peer: &str, grant: Grant) -> Token {
        self.link.grant(peer, grant)
    }

    fn revoke(&self, token: Token) {
        self.link.revoke(token);
    }

    async fn push(
        &self,
        to: &Address,
        token: Token,
        from: Arc<dyn BytesSource>,
        ranges: &[Range<u64>],
        pace: &dyn Pace,
    ) -> Result<(), LinkError> {
        self.link.push(to, token, from, ranges, pace).await
    }

    async fn pull(
        &self,
        from: &Address,
        token: Token,
        ranges: &[Range<u64>],
        into: Arc<dyn BytesSink>,
    ) -> Result<(), LinkError> {
        self.link.pull(from, token, ranges, into).await
    }

    async fn close(&self) {
        self.link.close().await;
    }
}
