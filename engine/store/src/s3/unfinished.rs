//! Multipart uploads that were never finished: finding and aborting them.
//!
//! Owns: the signed request that lists them, for which `object_store` has no call, and its answer. Does not own:
//! which of them are dead (`save::sweep`).

use super::wire::{Trouble, element};
use super::{Aws, Failed, MAX_PAGES, S3Store, no_answer};
use crate::{MAX_LISTED, Operation, StoreError, UnfinishedUpload};
use futures::StreamExt;
use object_store::client::{HttpRequest, HttpRequestBody};
use object_store::path::Path;
use object_store::signer::{Method, SignedUrlOptions, Signer};
use std::time::Duration;

/// Lifetime of a signed URL. The URL is used at once; the store refuses a clock that is further off than this anyway.
const URL_LIVES: Duration = Duration::from_secs(300);

/// Largest page, in bytes: at most 1000 uploads, each with a key of at most 1 KiB and an owner.
const PAGE_BYTES_MAX: usize = 8 << 20;

/// The beginning of the next page.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
struct Marker {
    key: String,
    upload: String,
}

/// A page of the listing.
#[derive(Debug, Default, PartialEq, Eq)]
struct Page {
    /// Pairs of (key, upload id), with the whole key.
    uploads: Vec<(String, String)>,
    next: Option<Marker>,
}

impl S3Store {
    pub(super) async fn list_unfinished(&self, aws: &Aws) -> Result<Vec<UnfinishedUpload>, StoreError> {
        let mut found = Vec::new();
        let mut marker = Marker::default();
        for _ in 0..MAX_PAGES {
            let page = self
                .repeat_attempts(Operation::List, "?uploads", || self.unfinished_page(aws, &marker))
                .await?;
            found.extend(page.uploads.into_iter().filter_map(|(key, upload_id)| {
                Some(UnfinishedUpload { key: key.strip_prefix(&self.prefix)?.to_owned(), upload_id })
            }));
            // A page that begins where the last one did would never end.
            match page.next.filter(|next| *next != marker) {
                Some(next) if found.len() <= MAX_LISTED => marker = next,
                Some(_) => break,
                None => return Ok(found),
            }
        }
        let (prefix, store) = ("?uploads".to_owned(), self.description.clone());
        Err(StoreError::TooMany { prefix, store, limit: MAX_LISTED })
    }

    async fn unfinished_page(&self, aws: &Aws, marker: &Marker) -> Result<Page, Failed> {
        let mut query = vec![("uploads", String::new()), ("prefix", self.prefix.clone())];
        if !marker.key.is_empty() {
            query.push(("key-marker", marker.key.clone()));
            query.push(("upload-id-marker", marker.upload.clone()));
        }
        let options = SignedUrlOptions::default().with_query(query);
        let root = Path::default();
        let url =
            self.attempt(0, aws.client.signed_url_opts(Method::GET, &root, URL_LIVES, &options)).await?;
        let malformed = |cause: String| Failed { trouble: Trouble::Malformed, cause: cause.into() };
        let mut request = HttpRequest::new(HttpRequestBody::empty());
        *request.uri_mut() = url.as_str().parse().map_err(|_| malformed("its URL is none".to_owned()))?;
        let deadline = self.deadline(0);
        let read = async {
            let response = aws.plain.execute(request).await.map_err(|error| {
                let error = object_store::Error::Generic { store: "S3", source: Box::new(error) };
                Failed { trouble: super::wire::trouble(&error), cause: Box::new(error) }
            })?;
            let mut body = Vec::new();
            let mut chunks = response.into_body().bytes_stream();
            while let Some(chunk) = chunks.next().await {
                let chunk =
                    chunk.map_err(|error| Failed { trouble: Trouble::NoAnswer, cause: Box::new(error) })?;
                if body.len() + chunk.len() > PAGE_BYTES_MAX {
                    return Err(malformed(format!("a page of more than {PAGE_BYTES_MAX} bytes came")));
                }
                body.extend_from_slice(&chunk);
            }
            parse(&String::from_utf8_lossy(&body))
                .ok_or_else(|| malformed("no list of uploads came".to_owned()))
        };
        tokio::time::timeout(deadline, read).await.unwrap_or_else(|_| Err(no_answer(deadline)))
    }

    pub(super) async fn abort_unfinished(&self, upload: &UnfinishedUpload) -> Result<(), StoreError> {
        let path = self.path(Operation::Delete, &upload.key)?;
        let abort = || self.client.abort_multipart(&path, &upload.upload_id);
        match self.repeat(Operation::Delete, &upload.key, 0, abort).await {
            Err(StoreError::NotFound { .. }) => Ok(()),
            result => result,
        }
    }
}

/// Parses `ListMultipartUploadsResult`; `None` for another document.
fn parse(document: &str) -> Option<Page> {
    let (_, inside) = document.split_once("<ListMultipartUploadsResult")?;
    let mut page = Page::default();
    let (head, mut rest) = inside.split_once("<Upload>").unwrap_or((inside, ""));
    let mut outside = head.to_owned();
    while !rest.is_empty() {
        let (upload, after) = rest.split_once("</Upload>")?;
        page.uploads.push((unescape(element(upload, "Key"))?, unescape(element(upload, "UploadId"))?));
        let (between, next) = after.split_once("<Upload>").unwrap_or((after, ""));
        outside.push_str(between);
        rest = next;
    }
    if element(&outside, "IsTruncated") == "true" {
        let (key, upload) = (element(&outside, "NextKeyMarker"), element(&outside, "NextUploadIdMarker"));
        page.next = Some(Marker { key: unescape(key)?, upload: unescape(upload)? });
    }
    Some(page)
}

/// Returns the text of an element; `None` for an entity that XML does not define itself.
fn unescape(text: &str) -> Option<String> {
    let mut parts = text.split('&');
    let mut plain = parts.next()?.to_owned();
    for part in parts {
        let (entity, after) = part.split_once(';')?;
        let number = |digits: &str, radix| char::from_u32(u32::from_str_radix(digits, radix).ok()?);
        plain.push(match entity {
            "amp" => '&',
            "lt" => '<',
            "gt" => '>',
            "quot" => '"',
            "apos" => '\'',
            _ => match entity.strip_prefix('#')? {
                hex if hex.starts_with('x') => number(&hex[1..], 16)?,
                decimal => number(decimal, 10)?,
            },
        });
        plain.push_str(after);
    }
    Some(plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_read_with_its_entities_and_its_end() {
        let page = parse(
            "<?xml version=\"1.0\"?><ListMultipartUploadsResult xmlns=\"x\"><Bucket>b</Bucket>\
             <NextKeyMarker>p/a&amp;b</NextKeyMarker><NextUploadIdMarker>2</NextUploadIdMarker>\
             <IsTruncated>true</IsTruncated>\
             <Upload><Key>p/a&amp;b</Key><UploadId>1</UploadId><Owner><ID>o</ID></Owner></Upload>\
             <Upload><UploadId>2</UploadId><Key>p/&#x41;&lt;&#66;</Key></Upload></ListMultipartUploadsResult>",
        )
        .unwrap();
        assert_eq!(page.uploads, [("p/a&b".into(), "1".into()), ("p/A<B".into(), "2".into())]);
        assert_eq!(page.next, Some(Marker { key: "p/a&b".into(), upload: "2".into() }));
        let last =
            "<ListMultipartUploadsResult><IsTruncated>false</IsTruncated></ListMultipartUploadsResult>";
        assert_eq!(parse(last), Some(Page::default()));
        for other in [
            "",
            "<html>",
            "<ListMultipartUploadsResult><Upload><Key>",
            "<ListMultipartUploadsResult><Upload><Key>&bad;</Key></Upload>",
        ] {
            assert_eq!(parse(other), None, "{other}");
        }
    }
}
