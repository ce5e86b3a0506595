//! Objects by path, and the part of the interface of S3 that clients use.

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex};
use std::time::SystemTime;

use bytes::Bytes;
use futures_util::stream;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Frame;
use hyper::header::{self, HeaderMap, HeaderName, HeaderValue};
use hyper::http::request::Parts;
use hyper::{Method, Response, StatusCode};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};
use quick_xml::escape::{escape, unescape};

use super::{Body, bytes_body};
use crate::rng::Rng;

/// Bytes that are read at once.
const PIECE_BYTES: u64 = 256 << 10;

/// What `encoding-type=url` leaves as it is.
const PLAIN: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'/');

/// The bytes of an object.
#[derive(Debug, Clone)]
pub(super) enum Content {
    Parts(Vec<Bytes>),
    /// See [`generate`].
    Generated {
        len_bytes: u64,
        seed: u64,
    },
    File(Arc<File>, u64),
}

/// Fills a buffer with the bytes of a generated object from an offset on: the word of eight bytes with number n, in
/// little-endian order, is (n + seed) × 0x9e3779b97f4a7c15 modulo 2^64.
pub fn generate(seed: u64, offset_bytes: u64, buffer: &mut [u8]) {
    let word = |n: u64| n.wrapping_add(seed).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes();
    let skip = (offset_bytes % 8) as usize;
    let head = buffer.len().min((8 - skip) % 8);
    let (first, rest) = buffer.split_at_mut(head);
    first.copy_from_slice(&word(offset_bytes / 8)[skip..][..head]);
    let number = offset_bytes.div_ceil(8);
    for (n, eight) in (number..).zip(rest.chunks_mut(8)) {
        eight.copy_from_slice(&word(n)[..eight.len()]);
    }
}

/// Random bytes: another seed gives others.
pub fn pattern(len_bytes: usize, seed: u64) -> Vec<u8> {
    let mut rng = Rng::new(seed);
    (0..len_bytes.div_ceil(8)).flat_map(|_| rng.next_u64().to_le_bytes()).take(len_bytes).collect()
}

impl Content {
    pub fn len_bytes(&self) -> u64 {
        match self {
            Content::Parts(parts) => parts.iter().map(|part| part.len() as u64).sum(),
            Content::Generated { len_bytes, .. } | Content::File(_, len_bytes) => *len_bytes,
        }
    }

    /// Some bytes from the start of a range that is not empty.
    fn read(&self, range: &Range<u64>) -> std::io::Result<Bytes> {
        let most = (range.end - range.start).min(PIECE_BYTES) as usize;
        match self {
            Content::Parts(parts) => {
                let mut at = range.start;
                for part in parts {
                    if at < part.len() as u64 {
                        let at = at as usize;
                        return Ok(part.slice(at..part.len().min(at + most)));
                    }
                    at -= part.len() as u64;
                }
                Ok(Bytes::new())
            }
            Content::Generated { seed, .. } => {
                let mut piece = vec![0; most];
                generate(*seed, range.start, &mut piece);
                Ok(piece.into())
            }
            Content::File(file, _) => {
                let mut piece = vec![0; most];
                file.read_exact_at(&mut piece, range.start)?;
                Ok(piece.into())
            }
        }
    }

    fn body(&self, range: Range<u64>) -> Body {
        let pieces = stream::unfold((self.clone(), range), |(content, mut range)| async {
            if range.is_empty() {
                return None;
            }
            let piece = content.read(&range);
            range.start =
                piece.as_ref().map_or(range.end, |piece| range.start + piece.len() as u64);
            Some((piece.map(Frame::data).map_err(Into::into), (content, range)))
        });
        StreamBody::new(pieces).boxed_unsync()
    }

    /// A strong ETag, the same for the same bytes. It does not look like an MD5, which clients would compare.
    fn etag(&self) -> String {
        let mut hash = xxhash_rust::xxh3::Xxh3::new();
        match self {
            Content::Parts(parts) => parts.iter().for_each(|part| hash.update(part)),
            Content::Generated { len_bytes, seed } => {
                hash.update(format!("{len_bytes} {seed}").as_bytes())
            }
            Content::File(file, len_bytes) => {
                let modified = file.metadata().and_then(|data| data.modified());
                hash.update(format!("{len_bytes} {modified:?}").as_bytes());
            }
        }
        format!("\"x{:016x}\"", hash.digest())
    }
}

#[derive(Debug, Clone)]
pub(super) struct Object {
    pub content: Content,
    pub etag: Option<String>,
    /// In the form of an HTTP header.
    pub modified: String,
    /// Content-Type and `x-amz-meta-…`.
    headers: Vec<(HeaderName, HeaderValue)>,
}

impl Object {
    pub fn new(content: Content) -> Object {
        let etag = Some(content.etag());
        let modified = httpdate::fmt_http_date(SystemTime::now());
        Object { content, etag, modified, headers: vec![] }
    }
}

#[derive(Default)]
struct Upload {
    headers: Vec<(HeaderName, HeaderValue)>,
    parts: BTreeMap<u64, (Bytes, String)>,
}

#[derive(Default)]
struct State {
    /// By bucket and key, with a slash in between.
    objects: BTreeMap<String, Object>,
    uploads: BTreeMap<String, Upload>,
    uploads_begun: u64,
}

/// See the module documentation.
#[derive(Default)]
pub(super) struct Objects(Mutex<State>);

impl Objects {
    pub fn put(&self, path: &str, object: Object) {
        self.0.lock().unwrap().objects.insert(path.to_owned(), object);
    }

    pub fn get(&self, path: &str) -> Option<Object> {
        self.0.lock().unwrap().objects.get(path).cloned()
    }

    pub fn change(&self, path: &str, change: impl FnOnce(&mut Object)) {
        change(self.0.lock().unwrap().objects.get_mut(path).expect("an object"));
    }

    pub fn remove(&self, path: &str) {
        self.0.lock().unwrap().objects.remove(path);
    }

    pub fn paths(&self) -> Vec<String> {
        self.0.lock().unwrap().objects.keys().cloned().collect()
    }

    pub fn answer(&self, request: &Parts, body: Bytes) -> Response<Body> {
        let path = path_of(request);
        let query: BTreeMap<String, String> = request
            .uri
            .query()
            .map(|query| url::form_urlencoded::parse(query.as_bytes()).into_owned().collect())
            .unwrap_or_default();
        let state = &mut *self.0.lock().unwrap();
        let is_read = matches!(request.method, Method::GET | Method::HEAD);
        let object = state.objects.get(&path).filter(|_| is_read);
        if let Some(object) = object {
            return read(object, &request.headers);
        }
        match path.split_once('/') {
            Some((_, key)) if !key.is_empty() => state.answer(request, &path, &query, body),
            Some((bucket, _)) => state.answer_bucket(&request.method, bucket, &query, &body),
            None => state.answer_bucket(&request.method, &path, &query, &body),
        }
    }
}

impl State {
    fn answer(
        &mut self,
        request: &Parts,
        path: &str,
        query: &BTreeMap<String, String>,
        body: Bytes,
    ) -> Response<Body> {
        let upload_id = query.get("uploadId");
        match (request.method.as_str(), upload_id) {
            ("PUT", Some(id)) => {
                let number = query.get("partNumber").and_then(|number| number.parse().ok());
                let (Some(upload), Some(number)) = (self.uploads.get_mut(id), number) else {
                    return failure(StatusCode::NOT_FOUND, "NoSuchUpload");
                };
                let etag = Content::Parts(vec![body.clone()]).etag();
                upload.parts.insert(number, (body, etag.clone()));
                with_etag(&etag)
            }
            ("POST", Some(id)) => self.complete(request, path, id, &body),
            ("DELETE", Some(id)) => {
                self.uploads.remove(id);
                empty(StatusCode::NO_CONTENT)
            }
            ("POST", None) if query.contains_key("uploads") => {
                self.uploads_begun += 1;
                let id = format!("upload-{}", self.uploads_begun);
                let headers = kept_headers(&request.headers);
                self.uploads.insert(id.clone(), Upload { headers, ..Upload::default() });
                xml(format!(
                    "<InitiateMultipartUploadResult><UploadId>{id}</UploadId></InitiateMultipartUploadResult>"
                ))
            }
            ("PUT", None) => {
                if let Some(refused) = self.refuses(request, path) {
                    return refused;
                }
                let mut object = match request.headers.get("x-amz-copy-source") {
                    None => Object::new(Content::Parts(vec![body])),
                    Some(source) => {
                        let source = percent_decode_str(source.to_str().unwrap_or_default());
                        let source = source.decode_utf8_lossy();
                        match self.objects.get(source.trim_start_matches('/')) {
                            Some(object) => Object::new(object.content.clone()),
                            None => return failure(StatusCode::NOT_FOUND, "NoSuchKey"),
                        }
                    }
                };
                let is_copy = request.headers.contains_key("x-amz-copy-source");
                object.headers = kept_headers(&request.headers);
                let etag = object.etag.clone().unwrap_or_default();
                self.objects.insert(path.to_owned(), object);
                match is_copy {
                    true => xml(format!(
                        "<CopyObjectResult><ETag>{}</ETag><LastModified>{}</LastModified></CopyObjectResult>",
                        escape(&etag),
                        humantime::format_rfc3339_millis(SystemTime::now())
                    )),
                    false => with_etag(&etag),
                }
            }
            ("DELETE", None) => {
                self.objects.remove(path);
                empty(StatusCode::NO_CONTENT)
            }
            ("GET" | "HEAD", _) => failure(StatusCode::NOT_FOUND, "NoSuchKey"),
            _ => failure(StatusCode::METHOD_NOT_ALLOWED, "MethodNotAllowed"),
        }
    }

    /// What a condition of a write says against it.
    fn refuses(&self, request: &Parts, path: &str) -> Option<Response<Body>> {
        let object = self.objects.get(path);
        let fails = match request.headers.get(header::IF_MATCH) {
            Some(_) if object.is_none() => {
                return Some(failure(StatusCode::NOT_FOUND, "NoSuchKey"));
            }
            Some(wanted) => !matches_etag(wanted, object?),
            None => object.is_some() && request.headers.contains_key(header::IF_NONE_MATCH),
        };
        fails.then(|| failure(StatusCode::PRECONDITION_FAILED, "PreconditionFailed"))
    }

    fn complete(&mut self, request: &Parts, path: &str, id: &str, body: &[u8]) -> Response<Body> {
        let Some(upload) = self.uploads.get(id) else {
            return failure(StatusCode::NOT_FOUND, "NoSuchUpload");
        };
        let body = String::from_utf8_lossy(body);
        let mut parts = vec![];
        for part in elements(&body, "Part") {
            let number = elements(&part, "PartNumber").next().and_then(|text| text.parse().ok());
            let etag = elements(&part, "ETag").next().unwrap_or_default();
            let sent = number.and_then(|number: u64| upload.parts.get(&number));
            match sent {
                Some((bytes, expected)) if expected.trim_matches('"') == etag.trim_matches('"') => {
                    parts.push(bytes.clone());
                }
                _ => return failure(StatusCode::BAD_REQUEST, "InvalidPart"),
            }
        }
        if parts.is_empty() {
            return failure(StatusCode::BAD_REQUEST, "MalformedXML");
        }
        if let Some(refused) = self.refuses(request, path) {
            return refused;
        }
        let mut object = Object::new(Content::Parts(parts));
        object.headers = upload.headers.clone();
        let etag = object.etag.clone().unwrap_or_default();
        self.objects.insert(path.to_owned(), object);
        self.uploads.remove(id);
        let (bucket, key) = path.split_once('/').unwrap_or_default();
        xml(format!(
            "<CompleteMultipartUploadResult><Bucket>{}</Bucket><Key>{}</Key><ETag>{}</ETag>\
             </CompleteMultipartUploadResult>",
            escape(bucket),
            escape(key),
            escape(&etag)
        ))
    }

    /// Buckets need not be created: each that is named exists.
    fn answer_bucket(
        &mut self,
        method: &Method,
        bucket: &str,
        query: &BTreeMap<String, String>,
        body: &[u8],
    ) -> Response<Body> {
        match method.as_str() {
            "GET" if bucket.is_empty() => {
                let mut names: Vec<_> =
                    self.objects.keys().filter_map(|path| Some(path.split_once('/')?.0)).collect();
                names.dedup();
                let buckets: String = names
                    .iter()
                    .map(|name| {
                        let date = "2015-10-21T07:28:00.000Z";
                        format!(
                            "<Bucket><Name>{}</Name><CreationDate>{date}</CreationDate></Bucket>",
                            escape(*name)
                        )
                    })
                    .collect();
                xml(format!(
                    "<ListAllMyBucketsResult><Buckets>{buckets}</Buckets></ListAllMyBucketsResult>"
                ))
            }
            "GET" if query.contains_key("location") => xml("<LocationConstraint/>".into()),
            "GET" if query.contains_key("versioning") => xml("<VersioningConfiguration/>".into()),
            "GET" if query.contains_key("uploads") => xml("<ListMultipartUploadsResult/>".into()),
            "GET" => self.list(bucket, query),
            "POST" if query.contains_key("delete") => {
                let mut deleted = String::new();
                for key in elements(&String::from_utf8_lossy(body), "Key") {
                    self.objects.remove(&format!("{bucket}/{key}"));
                    deleted.push_str(&format!("<Deleted><Key>{}</Key></Deleted>", escape(&*key)));
                }
                xml(format!("<DeleteResult>{deleted}</DeleteResult>"))
            }
            "HEAD" | "PUT" => empty(StatusCode::OK),
            "DELETE" => empty(StatusCode::NO_CONTENT),
            _ => failure(StatusCode::METHOD_NOT_ALLOWED, "MethodNotAllowed"),
        }
    }

    /// ListObjects, in its first and second version.
    fn list(&self, bucket: &str, query: &BTreeMap<String, String>) -> Response<Body> {
        let text = |name: &str| query.get(name).map_or("", String::as_str);
        let is_second = text("list-type") == "2";
        let (prefix, delimiter) = (text("prefix"), text("delimiter"));
        let after = match is_second {
            true => query.get("continuation-token").map_or(text("start-after"), String::as_str),
            false => text("marker"),
        };
        let most = text("max-keys").parse().unwrap_or(1000).min(1000);
        let shown = |text: &str| match query.contains_key("encoding-type") {
            true => utf8_percent_encode(text, PLAIN).to_string(),
            false => escape(text).into_owned(),
        };
        let start = format!("{bucket}/{prefix}");
        let (mut contents, mut prefixes, mut count) = (String::new(), String::new(), 0);
        let (mut last, mut next) = ("", None);
        for (path, object) in self.objects.range(start.clone()..) {
            if !path.starts_with(&start) {
                break;
            }
            let key = &path[bucket.len() + 1..];
            let end = match delimiter.is_empty() {
                true => None,
                false => key[prefix.len()..].find(delimiter),
            };
            let name = end.map_or(key, |end| &key[..prefix.len() + end + delimiter.len()]);
            if name <= after || name == last {
                continue;
            }
            if count == most {
                next = Some(last);
                break;
            }
            count += 1;
            last = name;
            if end.is_some() {
                prefixes.push_str(&format!(
                    "<CommonPrefixes><Prefix>{}</Prefix></CommonPrefixes>",
                    shown(name)
                ));
                continue;
            }
            let modified =
                httpdate::parse_http_date(&object.modified).unwrap_or(SystemTime::UNIX_EPOCH);
            contents.push_str(&format!(
                "<Contents><Key>{}</Key><LastModified>{}</LastModified><ETag>{}</ETag><Size>{}</Size>\
                 <StorageClass>STANDARD</StorageClass></Contents>",
                shown(key),
                humantime::format_rfc3339_millis(modified),
                escape(object.etag.as_deref().unwrap_or_default()),
                object.content.len_bytes()
            ));
        }
        let next_element = next.map_or_else(String::new, |next| match is_second {
            true => format!("<NextContinuationToken>{}</NextContinuationToken>", escape(next)),
            false => format!("<NextMarker>{}</NextMarker>", shown(next)),
        });
        let encoding = match query.contains_key("encoding-type") {
            true => "<EncodingType>url</EncodingType>",
            false => "",
        };
        xml(format!(
            "<ListBucketResult><Name>{}</Name><Prefix>{}</Prefix><Delimiter>{}</Delimiter><KeyCount>{count}</KeyCount>\
             <MaxKeys>{most}</MaxKeys>{encoding}<IsTruncated>{}</IsTruncated>{next_element}{contents}{prefixes}\
             </ListBucketResult>",
            escape(bucket),
            shown(prefix),
            shown(delimiter),
            next.is_some()
        ))
    }
}

/// Bucket and key.
pub(super) fn path_of(request: &Parts) -> String {
    let path = percent_decode_str(request.uri.path()).decode_utf8_lossy().into_owned();
    path.trim_start_matches('/').to_owned()
}

fn matches_etag(wanted: &HeaderValue, object: &Object) -> bool {
    wanted == "*" || wanted.to_str().ok() == object.etag.as_deref()
}

fn read(object: &Object, headers: &HeaderMap) -> Response<Body> {
    if headers.get(header::IF_MATCH).is_some_and(|wanted| !matches_etag(wanted, object)) {
        return failure(StatusCode::PRECONDITION_FAILED, "PreconditionFailed");
    }
    if headers.get(header::IF_NONE_MATCH).is_some_and(|known| matches_etag(known, object)) {
        return empty(StatusCode::NOT_MODIFIED);
    }
    let len_bytes = object.content.len_bytes();
    let range =
        headers.get(header::RANGE).and_then(|range| parse_range(range.to_str().ok()?, len_bytes));
    let mut answer = Response::builder()
        .header(header::ACCEPT_RANGES, "bytes")
        .header(header::LAST_MODIFIED, &object.modified);
    if let Some(etag) = &object.etag {
        answer = answer.header(header::ETAG, etag);
    }
    for (name, value) in &object.headers {
        answer = answer.header(name, value);
    }
    let range = match range {
        None => 0..len_bytes,
        Some(range) if range.is_empty() => {
            let mut answer = failure(StatusCode::RANGE_NOT_SATISFIABLE, "InvalidRange");
            let total = format!("bytes */{len_bytes}");
            answer.headers_mut().insert(header::CONTENT_RANGE, total.parse().expect("a header"));
            return answer;
        }
        Some(range) => {
            let content_range = format!("bytes {}-{}/{len_bytes}", range.start, range.end - 1);
            answer = answer
                .status(StatusCode::PARTIAL_CONTENT)
                .header(header::CONTENT_RANGE, content_range);
            range
        }
    };
    answer
        .header(header::CONTENT_LENGTH, range.end - range.start)
        .body(object.content.body(range))
        .expect("headers of an object")
}

/// The bytes that a header asks for, cut at the object's end; empty if there are none of them. None asks for all, as does
/// what is no range, or several.
pub(super) fn parse_range(text: &str, len_bytes: u64) -> Option<Range<u64>> {
    let (first, last) = text.strip_prefix("bytes=")?.split_once('-')?;
    if first.is_empty() {
        let count: u64 = last.parse().ok()?;
        return Some(len_bytes.saturating_sub(count)..len_bytes);
    }
    let first = first.parse().ok()?;
    let end = match last {
        "" => len_bytes,
        last => last.parse::<u64>().ok()?.saturating_add(1).min(len_bytes),
    };
    Some(first..end.max(first))
}

fn kept_headers(headers: &HeaderMap) -> Vec<(HeaderName, HeaderValue)> {
    let is_kept = |name: &HeaderName| {
        name == header::CONTENT_TYPE || name.as_str().starts_with("x-amz-meta-")
    };
    let kept = headers.iter().filter(|(name, _)| is_kept(name));
    kept.map(|(name, value)| (name.clone(), value.clone())).collect()
}

/// The contents of the elements with a name, which have no attributes and are not nested.
fn elements<'a>(xml: &'a str, name: &'a str) -> impl Iterator<Item = String> + 'a {
    let (open, close) = (format!("<{name}>"), format!("</{name}>"));
    let mut rest = xml;
    std::iter::from_fn(move || {
        let start = rest.find(&open)? + open.len();
        let end = start + rest[start..].find(&close)?;
        let content = &rest[start..end];
        rest = &rest[end + close.len()..];
        // What has elements itself is unescaped with them.
        let is_text = !content.contains('<');
        Some(if is_text { unescape(content).ok()?.into_owned() } else { content.to_owned() })
    })
}

fn empty(status: StatusCode) -> Response<Body> {
    let mut answer = Response::new(bytes_body(Bytes::new()));
    *answer.status_mut() = status;
    answer
}

fn with_etag(etag: &str) -> Response<Body> {
    let mut answer = empty(StatusCode::OK);
    answer.headers_mut().insert(header::ETAG, etag.parse().expect("a header"));
    answer
}

fn xml(text: String) -> Response<Body> {
    let text = format!("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n{text}");
    let answer = Response::builder()
        .header(header::CONTENT_TYPE, "application/xml")
        .header(header::CONTENT_LENGTH, text.len());
    answer.body(bytes_body(text.into())).expect("plain headers")
}

/// An error in the form of S3. Its message stands for what no error of a client may repeat.
pub(super) fn failure(status: StatusCode, code: &str) -> Response<Body> {
    let mut answer = xml(format!("<Error><Code>{code}</Code><Message>hunter2</Message></Error>"));
    *answer.status_mut() = status;
    answer
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generated_bytes_are_a_function_of_their_offset() {
        let mut all = [0; 1000];
        generate(7, 0, &mut all);
        assert_eq!(all[8..16], (8u64.wrapping_mul(0x9e37_79b9_7f4a_7c15)).to_le_bytes());
        let mut rng = Rng::new(1);
        for _ in 0..1000 {
            let start = rng.below(1000) as usize;
            let len = rng.below(1001 - start as u64) as usize;
            let mut part = vec![0; len];
            generate(7, start as u64, &mut part);
            assert_eq!(part, all[start..start + len], "{start} {len}");
        }
    }

    #[test]
    fn ranges_are_parsed() {
        for (text, range) in [
            ("bytes=0-9", Some(0..10)),
            ("bytes=90-", Some(90..100)),
            ("bytes=-7", Some(93..100)),
            ("bytes=-700", Some(0..100)),
            ("bytes=95-200", Some(95..100)),
            ("bytes=100-", Some(100..100)),
            ("bytes=0-18446744073709551615", Some(0..100)),
            ("bytes=0-1,3-4", None),
            ("rows=0-1", None),
        ] {
            assert_eq!(parse_range(text, 100), range, "{text}");
        }
    }

    #[test]
    fn elements_are_found() {
        let xml = "<D><Object><Key>a&amp;b</Key></Object><Object><Key>c</Key></Object></D>";
        assert_eq!(elements(xml, "Key").collect::<Vec<_>>(), ["a&b", "c"]);
        assert_eq!(elements(xml, "Object").count(), 2);
    }
}
